"""Tests which collectives are found in programs, and which of them are refused."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.collectives import Transfer
from pipejax.executors import collective_axes, own_transfers
from pipejax.executors._own_collectives import (
    OwnCollectiveError,
    check_no_own,
    spans_cpu_processes,
)

AXES = ("host", "device")
X = jnp.ones(5)


def on_hosts(local):
    """Compiles `local` for two hosts of two devices, each with all of X."""
    mesh = pj.data_mesh(4, axis_name=AXES, hosts=2)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped)


def summed(axis_name):
    return lambda x: lax.psum(x, axis_name)


def looped(x):
    return lax.scan(lambda x, _: (summed("host")(x), None), x, None, length=2)[0]


def branching(x):
    return lax.cond(x[0] > 0, lambda x: x, summed("device"), x)


def until_it_is_large(x):
    return lax.while_loop(lambda x: summed("host")(x).sum() < 9, lambda x: 2 * x, x)


def in_rows(x):
    return jax.vmap(summed("rows"), axis_name="rows")(x[None])[0]


@pytest.mark.parametrize(
    ("local", "axes"),
    [
        (lambda x: jnp.tanh(x).sum(axis=0) + x, set()),
        (lambda x: x + lax.axis_index("host"), set()),
        (in_rows, set()),
        (summed("host"), {"host"}),
        (summed(AXES), {"host", "device"}),
        (lambda x: lax.pmax(x, "host") + lax.pmin(x, "device"), {"host", "device"}),
        (lambda x: lax.ppermute(x, "device", [(0, 1)]), {"device"}),
        (lambda x: lax.all_gather(x, "host").sum(axis=0), {"host"}),
        (jax.grad(lambda x: summed("host")(x).sum()), {"host"}),
        (jax.checkpoint(jax.jit(summed("host"))), {"host"}),
        (looped, {"host"}),
        (branching, {"device"}),
        (until_it_is_large, {"host"}),
    ],
    ids=[
        *("none", "index", "vmap", "psum", "both", "pmax and pmin", "ppermute"),
        *("all_gather", "grad", "remat", "scan", "cond", "while"),
    ],
)
def test_axes_of_collectives(local, axes):
    """Neither an index along an axis nor an axis of `jax.vmap` exchanges anything."""
    assert collective_axes(on_hosts(local), X) == axes


def test_transfers_as_often_as_they_run():
    """Five floats are 20 bytes; two floats in each of three iterations are 8 bytes."""

    def local(x):
        def exchange(_, pair):
            return lax.pmax(pair, "device") + 1

        total = lax.psum(x, "host")
        return lax.fori_loop(0, 3, exchange, total[:2]).sum() + total

    found = own_transfers(on_hosts(local), X)
    small = Transfer("all-reduce", 2, 8)
    assert sorted(found) == [small, small, small, Transfer("all-reduce", 2, 20)]


def test_without_a_collective_nothing_is_compiled():
    """The argument cannot be compiled, so compiling it would raise an error."""
    assert own_transfers(lambda x: x + 1, X) == ()


class Device(NamedTuple):
    """A device of a mesh, with the process that it belongs to."""

    id: int
    process_index: int


def test_a_collective_between_processes_is_refused():
    program = on_hosts(summed("host")).lower(X).compile()
    check_no_own(program, [Device(i, 0) for i in range(4)])
    message = (
        r"^`executor` must not be 'host' on CPUs of several processes where `loss_fn`"
        r" or `tx` has a collective between processes, all-reduce \(.*psum.*\), which"
        r" must not run beside a communication thread\. Choose executor='fused', or"
        r" 'auto', which does\.$"
    )
    with pytest.raises(OwnCollectiveError, match=message) as caught:
        check_no_own(program, [Device(i, i // 2) for i in range(4)])
    assert caught.value.reason in str(caught.value)
    assert caught.value.reason.startswith("`loss_fn` or `tx` has a collective")


def test_a_collective_inside_each_process_is_allowed():
    program = on_hosts(summed("device")).lower(X).compile()
    check_no_own(program, [Device(i, i // 2) for i in range(4)])


@pytest.mark.parametrize(
    ("platform", "multi_process", "spans"),
    [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)],
)
def test_only_cpus_of_several_processes_are_looked_at(platform, multi_process, spans):
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(
        is_multi_process=multi_process, devices=np.array([device])
    )
    assert spans_cpu_processes(mesh) == spans

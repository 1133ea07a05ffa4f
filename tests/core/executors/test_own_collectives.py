"""Tests which collectives of a program are refused."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.executors._own_collectives import (
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


class Device(NamedTuple):
    """A device of a mesh, with the process that it belongs to."""

    id: int
    process_index: int


def test_collective_between_processes_is_refused():
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


def test_collective_inside_each_process_is_allowed():
    program = on_hosts(summed("device")).lower(X).compile()
    check_no_own(program, [Device(i, i // 2) for i in range(4)])


@pytest.mark.parametrize(
    ("platform", "multi_process", "spans"),
    [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)],
)
def test_check_applies_only_to_cpus_of_several_processes(
    platform, multi_process, spans
):
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(
        is_multi_process=multi_process, devices=np.array([device])
    )
    assert spans_cpu_processes(mesh) == spans

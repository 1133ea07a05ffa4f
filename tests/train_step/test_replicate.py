"""Tests arrays on all devices, and the check that all processes pass the same ones."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.train_step._replicate import check_same, placed

from .. import groups
from ..helpers import assert_bits_equal


def test_every_device_has_a_copy():
    given = {"params": {"w": np.ones(2, np.float32)}, "opt_state": (jnp.int32(5),)}
    given |= {"rng": None}
    mesh = pj.data_mesh(2)
    found = placed(given, jax.tree.map(lambda _: P(), given), mesh)
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for leaf, wanted in zip(*map(jax.tree.leaves, (found, given)), strict=True):
        assert [x.device for x in leaf.addressable_shards] == list(mesh.devices)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_key_keeps_its_kind(kind):
    key = jax.random.key(3, impl=kind)
    found = placed({"rng": key}, {"rng": P()}, pj.data_mesh(2))["rng"]
    assert found.dtype == key.dtype
    assert found.is_fully_replicated
    assert len(found.sharding.device_set) == 2
    assert_bits_equal(*map(jax.random.key_data, (found, key)))


def said(monkeypatch, *givens):
    """
    Returns the message of each process, or `None` for a process without one.

    Threads stand for processes, and a barrier for the network.

    Args:
      monkeypatch: The fixture.
      *givens: The arguments of each process.
    """
    here, rows = threading.local(), {}
    barrier = threading.Barrier(len(givens), timeout=30)

    def process_allgather(value):
        rows[here.rank] = value
        barrier.wait()
        found = np.stack([rows[rank] for rank in range(len(givens))])
        barrier.wait()
        return found

    def run(rank):
        here.rank = rank
        try:
            check_same(givens[rank], "train.init")
        except ValueError as error:
            return str(error)

    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    with concurrent.futures.ThreadPoolExecutor(len(givens)) as pool:
        return list(pool.map(run, range(len(givens))))


ZEROS = np.zeros((2, 3), np.float32)
NAN = np.full(2, np.nan, np.float32)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ZEROS, ZEROS.copy()),
        (ZEROS, jnp.zeros((2, 3))),
        (NAN, NAN.copy()),
        (jax.random.key(0), jax.random.key(0)),
        (jax.random.PRNGKey(0), jax.random.PRNGKey(0)),
    ],
)
def test_equal_arrays_are_accepted(monkeypatch, ours, theirs):
    found = said(monkeypatch, {"params": ours}, {"params": theirs})
    assert found == [None, None]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ZEROS, np.nextafter(ZEROS, np.float32(1))),
        (ZEROS, -ZEROS),
        (ZEROS, ZEROS.reshape(3, 2)),
        (ZEROS, ZEROS.view(np.int32)),
        (jax.random.key(0), jax.random.key(1)),
        # The keys have the same data and different generators.
        (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
    ],
)
def test_differing_arrays_are_named(monkeypatch, ours, theirs):
    givens = [{"params": {"a": ZEROS, "b": x}} for x in (ours, theirs, ours, theirs)]
    message = (
        "`params['b']` must be the same on every process, because every device has a"
        " copy; got other values on processes [1, 3] than on process 0. Make it from"
        " the same seed or the same file on every process."
    )
    assert said(monkeypatch, *givens) == [message] * 4


def test_first_differing_array_is_named(monkeypatch):
    """Names are sorted, so `opt_state` comes before `params`."""
    one, two = ({"params": {"w": x}, "opt_state": [ZEROS]} for x in (ZEROS, ZEROS + 1))
    found = said(monkeypatch, one, two, one | {"opt_state": [ZEROS + 2]})
    start = "`opt_state[0]` must be the same on every process, because"
    assert all(x.startswith(start) for x in found)
    assert all("on processes [1, 2] than on process 0" in x for x in found)


def test_differing_structures_are_reported_with_own_names(monkeypatch):
    found = said(monkeypatch, {"params": {"a": ZEROS}}, {"params": {"b": ZEROS}})
    message = (
        "`train.init` must be given the same structure of arrays on every process; got"
        " other structures on processes [1] than on process 0. Here are"
        " [\"params['{}']\"]."
    )
    assert found == [message.format("a"), message.format("b")]


@pytest.mark.parametrize("odd", range(8))
def test_differing_shard_of_any_device_is_found(odd):
    mesh = groups.mesh_of(2, "fsdp and tp")
    params = groups.placed(mesh, "fsdp and tp")

    def one(number, shard):
        value = shard.data + (number == odd)
        return jax.device_put(value, shard.device)

    params["up"] = jax.make_array_from_single_device_arrays(
        params["up"].shape,
        params["up"].sharding,
        [one(i, x) for i, x in enumerate(params["up"].addressable_shards)],
    )
    train = pj.make_train_step(
        groups.loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host"
    )
    message = r"`params\['up'\]` must be the same in every group, along 'host'; got"
    with pytest.raises(ValueError, match=message):
        train.init(params)

"""Tests that sharded states come back on other groups and other inner axes."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint

from ..helpers import assert_bits_equal, normal_batches


def loss_fn(params, batch):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean() + params["b"].sum()


def params():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 16)).astype(np.float32)
    return {"w": w, "b": np.ones((4,), np.float32)}


def batches(count):
    return normal_batches(count, size=8, inputs=8, outputs=16)


def make(groups, inner, **options):
    """Returns a train step for groups of `inner` devices, and parameters."""
    mesh = pj.data_mesh(groups * inner, axis_name=("host", "fsdp"), hosts=groups)
    train = pj.make_train_step(
        loss_fn, optax.adamw(1e-2), mesh=mesh, axis_name="host", **options
    )
    given = params() | {
        "w": jax.device_put(params()["w"], NamedSharding(mesh, P("fsdp")))
    }
    return train, given


def run(train, state, steps):
    for batch in batches(steps):
        given = train.batch(batch, axis_name=("host", "fsdp"))
        state, _ = train.step(state, given)
    return state


def restored(folder, train, given, state):
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        return checkpoint.restore(manager, train, train.abstract_state(given))


def test_another_inner_mesh_changes_no_bit(tmp_path):
    train, given = make(2, 2)
    state = run(train, train.init(given), 3)
    other, given = make(2, 4)
    found = restored(tmp_path, other, given, state)
    assert not found.drained
    assert_bits_equal(
        *(
            jax.device_get((x.params, x.opt_state, x.in_flight.pending[0].gradients))
            for x in (found.state, state)
        )
    )
    wanted = jax.tree.map(lambda x: x.sharding, other.abstract_state(given))
    for leaf, sharding in zip(
        *map(jax.tree.leaves, (found.state, wanted)), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    other.step(found.state, batches(1)[0])


@pytest.mark.parametrize(
    ("groups", "inner"), [(4, 2), pytest.param(1, 4, marks=pytest.mark.full)]
)
def test_another_number_of_groups_drains_the_state(tmp_path, groups, inner):
    train, given = make(2, 2)
    state = run(train, train.init(given), 3)
    other, given = make(groups, inner)
    found = restored(tmp_path, other, given, state)
    assert found.drained
    wanted, _ = train.drain(state)
    for leaf, right in zip(
        *(jax.tree.leaves((x.params, x.opt_state)) for x in (found.state, wanted)),
        strict=True,
    ):
        np.testing.assert_allclose(leaf, right, rtol=1e-5, atol=1e-7)
    other.step(found.state, batches(1)[0])

"""Tests checkpoints of runs whose optimizer is sharded."""

import jax
import numpy as np
import pytest

from pipejax import checkpoint

from ..core.executors import pieces
from ..helpers import assert_bits_equal, batches

FULL = pytest.mark.full


def made(name, devices):
    train = pieces.make(name, devices)
    return train, train.init(pieces.params())


def trained(train, state, steps, first=0):
    return pieces.trained(train, state, steps, first)


def moved(folder, train, state, other):
    """Saves a state, and restores it for another train step."""
    train.join()
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        like = other.abstract_state(pieces.params())
        return checkpoint.restore(manager, other, like)


@pytest.mark.parametrize("name", [pytest.param("predicted", marks=FULL), "int8"])
def test_restored_run_continues_bit_for_bit_on_the_same_devices(tmp_path, name):
    train, state = made(name, 4)
    state = trained(train, state, 3)
    again = moved(tmp_path, train, state, train).state
    assert_bits_equal(jax.device_get(again), jax.device_get(state))
    ends = [trained(train, x, 3, 3).params for x in (state, again)]
    assert_bits_equal(*jax.device_get(ends))


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=FULL)])
def test_restore_on_another_number_of_devices_drains(tmp_path, devices):
    train, state = made("predicted", 4)
    state = trained(train, state, 3)
    other, _ = made("predicted", devices)
    found = moved(tmp_path, train, state, other)
    assert found.drained
    wanted, _ = train.drain(state)
    for leaf, right in zip(
        *(jax.tree.leaves((x.params, x.opt_state)) for x in (found.state, wanted)),
        strict=True,
    ):
        np.testing.assert_allclose(leaf, right, rtol=1e-5, atol=1e-7)
    like = other.abstract_state(pieces.params())
    for leaf, form in zip(*map(jax.tree.leaves, (found.state, like)), strict=True):
        assert leaf.shape == form.shape
        assert leaf.sharding.is_equivalent_to(form.sharding, leaf.ndim)
    other.step(found.state, other.batch(batches(1)[0]))

"""Tests how a train step continues from what was read of a checkpoint."""

import functools

import jax
import numpy as np
import pytest

from pipejax import checkpoint
from pipejax.checkpoint._pipeline_form import wanted_of_pipeline
from pipejax.checkpoint._pipeline_state import pipeline_state
from pipejax.checkpoint._read import read_step

from ..helpers import assert_bits_equal, batches
from .helpers import host, init, run, train_step


@pytest.mark.parametrize("devices", [2, 4])
def test_other_devices_apply_gradients_in_flight(manager, devices):
    train, other = train_step(2), train_step(devices)
    state = run(train, init(train), batches(3))
    train.join()
    checkpoint.save(manager, state)
    manager.wait_until_finished()
    like = jax.eval_shape(lambda: init(other))
    choose = functools.partial(wanted_of_pipeline, other, like)
    saved = read_step(manager, choose, 3)
    found, drained, infos = pipeline_state(other, like, saved)
    assert drained == (devices != 2)
    assert len(infos) == (devices != 2)
    if drained:
        state, _ = train.drain(state)
        pairs = zip(*map(jax.tree.leaves, (found.params, state.params)), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    else:
        assert_bits_equal(host(found), host(state))

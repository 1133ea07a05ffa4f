"""Tests that every leaf is checked when a checkpoint is read."""

import functools
import shutil

import pytest

from pipejax import checkpoint
from pipejax.checkpoint._fault import Fault
from pipejax.checkpoint._pipeline_form import wanted_of_pipeline
from pipejax.checkpoint._read import Saved, read_step, rebuilt

from ..helpers import batches
from .helpers import init, run, train_step


@pytest.fixture
def saved(manager, train):
    state = init(train)
    for _ in range(2):
        checkpoint.save(manager, state)
        state = run(train, state, batches(1))
    manager.wait_until_finished()
    return manager


def read_by(train, like):
    return functools.partial(wanted_of_pipeline, train, like)


def test_whole_checkpoint_is_returned(saved, train, like):
    found = read_step(saved, read_by(train, like), 1)
    assert isinstance(found, Saved)
    assert found.meta["step"] == int(found.arrays["step"]) == 1
    assert found.wanted.before.devices == 2
    assert int(rebuilt(found).step) == 1
    assert found.extras == {}


def test_arrays_of_another_step_are_damage(saved, train, like):
    """The leaf is named: at step 1, the key and the passengers may be unchanged."""
    shutil.rmtree(saved.directory / "1" / "state")
    shutil.copytree(saved.directory / "0" / "state", saved.directory / "1" / "state")
    found = read_step(saved, read_by(train, like), 1)
    assert isinstance(found, Fault)
    assert found.damaged
    assert " leaves are not what was saved, the first is " in found.text


def test_checkpoint_of_another_width_is_refused_without_damage(saved, like):
    with pytest.raises(ValueError, match="`train` must have width=2"):
        read_step(saved, read_by(train_step(2, width=3), like), 1)

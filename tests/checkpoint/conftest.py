"""Provides a manager of checkpoints in a temporary folder."""

import jax
import pytest

from pipejax import checkpoint

from .helpers import init, train_step


@pytest.fixture(scope="module")
def train():
    """Returns a train step on two devices."""
    return train_step(2)


@pytest.fixture
def like(train):
    """Returns the form of the states of `train`."""
    return jax.eval_shape(lambda: init(train))


@pytest.fixture
def manager(tmp_path):
    with checkpoint.manager(tmp_path / "run") as manager:
        yield manager

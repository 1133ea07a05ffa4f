"""Checks a failing save: it raises, and harms neither earlier nor later checkpoints."""

import contextlib
import pathlib
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint

from ..helpers import assert_bits_equal


@contextlib.contextmanager
def largest_file(size):
    """Makes writing more than `size` bytes to a file fail, as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def loss_fn(params, batch):
    return jnp.mean(params["w"]) * jnp.mean(batch["x"])


def main(folder):
    train = pj.make_train_step(loss_fn, optax.adam(1e-2), mesh=pj.data_mesh())
    noise = np.random.default_rng(0).normal(size=(300, 400))  # does not compress
    states = [train.init({"w": noise.astype(np.float32)})]
    for batch in [{"x": np.ones((2, 1), np.float32)}] * 3:
        states.append(train.step(states[-1], batch)[0])
    like = jax.eval_shape(lambda: states[0])
    with checkpoint.manager(folder) as manager:

        def assert_latest(state):
            restored = checkpoint.restore(manager, train, like)
            assert_bits_equal(restored.state, state)

        checkpoint.save(manager, states[1])
        manager.wait_until_finished()
        with largest_file(100_000):
            checkpoint.save(manager, states[2])
            with pytest.raises(ValueError, match="File too large"):
                # This raises the error of the save before.
                checkpoint.save(manager, states[3])
        assert_latest(states[1])
        checkpoint.save(manager, states[2])  # the step whose save failed
        assert_latest(states[2])


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

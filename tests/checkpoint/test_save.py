"""Tests that `save` refuses bad input before it writes, and harms no checkpoint."""

import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import checkpoint
from pipejax.checkpoint._save import _check_writable

from ..helpers import assert_bits_equal, batches, with_trainable
from .helpers import entries, host, init, run, train_step


@pytest.fixture(scope="module")
def train():
    return train_step()


@pytest.fixture(scope="module")
def states(train):
    """Returns the states at steps 0, 1 and 2, none of which is donated."""
    data = batches(2)
    return [run(train, init(train), data[:steps]) for steps in range(3)]


def listed(manager):
    manager.wait_until_finished()
    return entries(manager.directory)


def refused(manager, state, match, extras=None):
    """Asserts that `save` raises a ValueError and leaves the folder unchanged."""
    before = listed(manager)
    with pytest.raises(ValueError, match=match):
        checkpoint.save(manager, state, extras)
    assert listed(manager) == before


def assert_latest(manager, train, state, extras=None):
    """Asserts that the latest checkpoint holds `state` and `extras`."""
    restored = checkpoint.restore(manager, train, jax.eval_shape(lambda: init(train)))
    assert restored.extras == (extras or {})
    assert_bits_equal(host(restored.state), host(state))


def test_refused_save_harms_no_earlier_or_later_checkpoint(manager, train, states):
    """A refused save harms neither earlier checkpoints nor later saves."""
    checkpoint.save(manager, states[0], {"saved": 0})
    refused(manager, states[1], r"`extras` must be .*numpy.int64", {"n": np.int64(1)})
    refused(manager, states[0], r"`state` must be of a later step")
    refused(manager, {"w": 1}, r"`state` must be the pj.PipelineState .* got dict")
    assert_latest(manager, train, states[0], {"saved": 0})
    checkpoint.save(manager, states[1], {"saved": 1})
    assert_latest(manager, train, states[1], {"saved": 1})


def test_step_cannot_be_saved_twice(manager, train, states):
    """The drained state of a step differs from the saved one, and is refused too."""
    checkpoint.save(manager, states[1])
    rule = r"later step than .*got step {} where the latest is of step 1.*delete\(1\)"
    refused(manager, train.drain(copied(states[1]))[0], rule.format(1))
    refused(manager, states[0], rule.format(0))
    assert_latest(manager, train, states[1])
    manager.delete(1)
    checkpoint.save(manager, states[0])
    assert_latest(manager, train, states[0])


def copied(state):
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)


def test_donated_state_is_refused(manager, train, states):
    state = copied(states[1])
    run(train, state, batches(1))
    rule = r"`state` must still have its arrays, got params\['bias'\] deleted: .*donate"
    refused(manager, state, rule)
    state = copied(states[1])
    state.opt_state[0].mu["out"].delete()
    refused(manager, state, r"got opt_state\[0\]\.mu\['out'\] deleted")
    checkpoint.save(manager, states[1])
    assert_latest(manager, train, states[1])


@pytest.mark.parametrize("leaf", [np.float32(1), 1.5, jax.ShapeDtypeStruct((), "int8")])
def test_leaves_other_than_jax_arrays_are_refused(manager, states, leaf):
    state = states[1]._replace(skipped=leaf)
    rule = rf"`state` must hold jax.Arrays, got skipped of type {type(leaf).__name__}\."
    refused(manager, state, rule + " Place it")


def test_traced_state_is_refused(manager, states):
    with pytest.raises(ValueError, match=r"`state` must not be traced, got params"):
        jax.jit(lambda state: checkpoint.save(manager, state))(states[1])
    assert listed(manager) == []


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A pytree node that gives both of its children the same key."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("child")
        return [(key, child) for child in self.children], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_leaves_of_equal_names_are_refused(manager, states):
    state = with_trainable(states[1], params=Twins(jnp.ones(2), jnp.zeros(2)))
    refused(manager, state, r"`state` must have leaves of different names, .*\.child")


def test_extras_and_state_may_change_during_a_save(manager, train, states):
    extras, state = {"position": [1]}, copied(states[1])
    checkpoint.save(manager, state, extras)
    extras["position"].append(2)
    run(train, state, batches(1))  # donates the saved state
    assert_latest(manager, train, states[1], {"position": [1]})


def test_save_to_a_full_disk_is_an_error(tmp_path):
    """Runs in its own process: Orbax's threads write even to loops that are closed."""
    subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.full_disk", str(tmp_path)],
        cwd=pathlib.Path(__file__).parents[2],
        check=True,
    )


class Bucket:
    """A folder in a bucket: there are files alone, and no folder can be removed."""

    def __init__(self, name):
        self.name, self.files = name, set()

    def __fspath__(self):
        return self.name

    def __truediv__(self, name):
        inside = Bucket(f"{self.name}/{name}")
        inside.files = self.files
        return inside

    def mkdir(self, exist_ok=False):
        pass

    def rmdir(self):
        raise NotADirectoryError(self.name)

    def write_text(self, text):
        self.files.add(self.name)

    def unlink(self):
        self.files.remove(self.name)


def test_bucket_without_folders_is_writable():
    bucket = Bucket("gs://bucket/run")
    _check_writable(types.SimpleNamespace(directory=bucket))
    assert bucket.files == set()

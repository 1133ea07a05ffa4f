"""Tests a device's own gradients through a codec, with and without feedback."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs, transforms
from pipejax.transforms import CompressState

from ..helpers import assert_bits_equal
from .loops import random_like

TREE = {"w": jnp.zeros((8, 12)), "b": jnp.zeros(5)}


def test_compress_encodes_all_leaves_as_one_vector():
    """A block of eight crosses into the next leaf, and sign sends a mean magnitude."""
    gradients = {
        "a": jnp.array([[1.0, -3.0]]),
        "b": jnp.array([2.0, 2, -2, 2, 3, -1, -5]),
    }
    tx = transforms.compress(codecs.error_feedback(codecs.sign(8)))
    state = tx.init(gradients)
    updates, state = tx.update(gradients, state)
    # The first eight elements have a mean magnitude of 2. The last block is -5 and
    # padding.
    np.testing.assert_array_equal(updates["a"], [[2, -2]])
    np.testing.assert_array_equal(updates["b"][:6], [2, 2, -2, 2, 2, -2])
    sent = np.concatenate([np.ravel(updates["a"]), updates["b"]])
    given = np.float32([1, -3, 2, 2, -2, 2, 3, -1, -5])
    np.testing.assert_array_equal(state.codec.residual[:9], given - sent)


def test_compress_leaves_an_empty_tree_unchanged():
    """A tree without elements passes unchanged, and its state is empty."""
    tx = transforms.compress(codecs.int8())
    nothing = {"void": jnp.zeros((0, 3)), "none": None}
    state = tx.init(nothing)
    assert state == CompressState(())
    updates, after = tx.update(nothing, state)
    assert updates["void"].shape == (0, 3)
    assert after == state


def test_compress_joins_all_dtypes_in_float32():
    mixed = TREE | {"half": jnp.zeros(10, jnp.bfloat16), "void": jnp.zeros(0, "f2")}
    state = transforms.compress(codecs.error_feedback(codecs.sign(8))).init(mixed)
    assert isinstance(state, CompressState)
    # 111 elements are padded to a multiple of eight blocks of 8.
    assert state.codec.residual.shape == (128,)
    assert state.codec.residual.dtype == jnp.float32


def test_sum_of_updates_follows_the_sum_of_gradients():
    """`sum Delta = sum g - e`; a step has two operations that round sums below s."""
    steps, tree = 8, {"w": jnp.zeros(64)}
    tx = transforms.compress(codecs.error_feedback(codecs.top_k(4)))
    gradients = random_like(tree, (steps,))["w"]
    state, sent, seen = tx.init(tree), np.zeros(64), 0.0
    update = jax.jit(tx.update)
    for g in gradients:
        updates, state = update({"w": g}, state)
        sent += np.asarray(updates["w"], np.float64)
        residual = np.asarray(state.codec.residual, np.float64)
        seen = seen + np.abs(g) + np.abs(residual)
    bound = 2 * steps * 2.0**-24 * seen
    total = gradients.astype(np.float64).sum(axis=0)
    assert (np.abs(sent + residual - total) <= bound).all()


@pytest.mark.parametrize("bad", ["int8", 8])
def test_compress_refuses_values_other_than_codecs(bad):
    message = r"`codec` must be a codec such as pj\.codecs\.int8\(\).*got "
    with pytest.raises(ValueError, match=message):
        transforms.compress(bad)


def test_compress_warns_of_a_biased_codec_without_feedback():
    with pytest.warns(UserWarning, match=r"Sign is biased: .*error_feedback\(codec\)"):
        transforms.compress(codecs.sign())


def test_init_refuses_leaves_too_small_for_the_codec():
    tx = transforms.compress(codecs.error_feedback(codecs.top_k(102)))
    with pytest.raises(ValueError, match=r"`k` must be at most the 101 elements"):
        tx.init(TREE)


def test_compress_keeps_complex_numbers_and_dtypes():
    gradients = {
        "c": jnp.array([1 + 2j, 3 - 4j], jnp.complex64),
        "h": jnp.ones(2, jnp.float16),
        "s": jnp.float32(5),
    }
    tx = transforms.compress(codecs.cast("float32"))
    updates, _ = jax.jit(tx.update)(gradients, tx.init(gradients))
    assert_bits_equal(updates, gradients)

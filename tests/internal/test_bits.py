"""Tests packed codes against a loop over bits, and words against NumPy's views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.bits import from_words, pack, poison, to_words, unpack

from ..helpers import assert_bits_equal, x64


def pack_ref(codes, bits):
    """Puts code number `j + i m'` into byte j, shifted by `i bits`; m' = m bits / 8."""
    packed = np.zeros(len(codes) * bits // 8, np.uint8)
    for number, code in enumerate(codes):
        i, j = divmod(number, len(packed))
        packed[j] |= code << (i * bits)
    return packed


def test_four_bit_codes_are_packed_by_halves():
    """The first half of the codes is in the lower halves of the bytes."""
    packed = pack(jnp.uint8([0x1, 0x2, 0x3, 0x4]), 4)
    assert_bits_equal(packed, np.uint8([0x31, 0x42]))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_rows_equal_a_loop(bits):
    codes = np.random.default_rng(bits).integers(2**bits, size=(3, 40)).astype(np.uint8)
    packed = jax.jit(pack, static_argnums=1)(codes, bits)
    assert_bits_equal(packed, np.stack([pack_ref(row, bits) for row in codes]))
    assert_bits_equal(jax.jit(unpack, static_argnums=1)(packed, bits), codes)


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        ("float32", "uint8"),
        ("float32", "uint32"),
        ("float64", "uint32"),
        ("bfloat16", "uint16"),
    ],
)
def test_words_keep_all_bits(dtype, word):
    """The lowest word comes first, and a NaN with a payload and -0 keep their bits."""
    values = np.array([1, -0.0, np.inf, -np.nan, 1e-30], jnp.dtype(dtype))
    with x64():
        words = to_words(jnp.asarray(values), jnp.dtype(word))
        back = from_words(words, dtype)
    assert_bits_equal(words, values.view(word))
    assert back.dtype == dtype
    assert_bits_equal(np.asarray(back).view(word), values.view(word))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_element_poisons_the_sum(bad):
    """Finds the bad element among 5,000; XLA's maximum may lose a NaN on CPUs."""
    x = np.ones(5000, np.float32)
    poisoned = jax.jit(poison)
    assert poisoned(x) == 0
    x[4321] = bad
    assert np.isnan(poisoned(x))

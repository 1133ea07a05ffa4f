"""Tests that `AllBits` sends every bit of NaN and -0, and both halves of a float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.codecs._cast import AllBits

from ..helpers import assert_bits_equal, x64


@pytest.mark.parametrize(("dtype", "bits"), [("float32", "u4"), ("float64", "u8")])
def test_all_bits_payload_is_the_vector(dtype, bits):
    """The vector holds a NaN with a payload, -0 and the smallest denormal number."""
    patterns = np.array([0, 1, -(2 ** (8 * np.dtype(bits).itemsize - 1)), -1])
    x = patterns.astype(bits).view(dtype)
    with x64():
        codec = AllBits().of(dtype=dtype)
        payload, state = codec.encode(jnp.asarray(x), ())
        decoded = codec.decode(payload, 4)
    assert state == ()
    assert_bits_equal(payload, x.view(np.uint32))
    assert payload.nbytes == codec.size(4) == x.nbytes
    assert_bits_equal(np.asarray(decoded).view(bits), x.view(bits))


def test_all_bits_does_not_round_float64():
    """`AllBits` keeps the last bit, which `cast("float32")` would round off."""
    x = 1 + 2.0**-52
    with x64():
        codec = AllBits("float64")
        decoded = codec.decode(codec.encode(jnp.float64([x]), ())[0], 1)
    assert decoded.dtype == jnp.float64
    assert float(decoded[0]) == x


def test_bfloat16_travels_as_float32():
    """The codec sends 4 bytes for each element, as many as for float32."""
    payload, _ = AllBits().encode(jnp.bfloat16([1.5, -2]), ())
    assert_bits_equal(payload, np.float32([1.5, -2]).view(np.uint32))

"""Tests the layout of payloads with one scale per block."""

import jax
import numpy as np
import pytest

from pipejax import codecs as c

from ..helpers import assert_bits_equal
from .payloads import encoded, scales


def test_payload_holds_all_codes_before_all_scales():
    """An outlier in the second block does not change the levels of the first."""
    small = [127, 1, 2, 3, 4, 5, 6, 7]
    payload, decoded = encoded(c.int8(8), [*small, 127e6, *small[1:]])
    assert payload[:8].tobytes() == np.int8(small).tobytes()
    assert payload[16:].tobytes() == scales(127, 127e6)
    assert_bits_equal(decoded, np.float32([*small, 127e6, *[0] * 7]))


@pytest.mark.parametrize("make", [c.int8, c.int4, c.int2, c.fp4, c.fp8, c.sign])
def test_nan_in_a_long_block_is_kept(make):
    """XLA's maximum on CPUs loses a NaN in blocks of 4,096 elements and more."""
    codec = make(block=4096)
    x = np.ones(codec.multiple, np.float32)
    x[1234] = np.nan
    _, decoded = encoded(codec, x)
    assert np.isnan(decoded[1234])


@pytest.mark.parametrize(
    ("codec", "exponent"),
    [
        *((make(8), -96) for make in (c.int8, c.int4, c.int2, c.fp4, c.sign)),
        (c.fp8("e4m3", 8), -96),
        (c.rotated(c.int4(8), jax.random.key(0), block=64), -96),
        (c.quantize(8), -89),
    ],
    ids=lambda x: type(x).__name__,
)
def test_small_numbers_are_decoded_like_large_numbers(codec, exponent):
    """docs/compression.md says so from 1e-29 on, and from 1e-27 on for `quantize`."""
    assert {-96: 1e-29, -89: 1e-27}[exponent] < 2.0**exponent
    x = np.random.default_rng(0).uniform(-1, 1, 64).astype(np.float32)
    x[::8] = 1  # the largest magnitude of each block
    _, large = encoded(codec, x)
    _, small = encoded(codec, np.ldexp(x, exponent))
    np.testing.assert_allclose(np.ldexp(small, -exponent), large, rtol=1e-5)

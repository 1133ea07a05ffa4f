"""Tests the layout of payloads with one scale per block."""

import jax
import numpy as np
import pytest

from pipejax import codecs as c

from ..helpers import assert_bits_equal
from .payloads import encoded, scales

MAX = float(np.finfo(np.float32).max)


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


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        *((make(block=8), MAX) for make in (c.int8, c.int4, c.fp4, c.fp8, c.sign)),
        *((c.truncate(), MAX), (c.quantize(2), 1.7e38), (c.quantize(8), 1.7e38)),
        *((c.bf16(), 3.38e38), (c.top_k(0.5), 3.38e38), (c.int2(8), 1.8e38)),
        (c.stochastic(c.bf16(), jax.random.key(0)), 3.38e38),
        (c.random_k(0.25, jax.random.key(0)), 3.4e38 / 4),
        (c.rotated(c.int4(8), jax.random.key(0), block=64), 3.4e38 / 8),
        (c.power_sgd(1, jax.random.key(0)).of(((8, 8),)), 5e37 / 8),
    ],
    ids=lambda x: type(x).__name__,
)
def test_large_numbers_are_decoded_to_finite_numbers(codec, most):
    """docs/compression.md gives these limits, and says where none is."""
    _, equal = encoded(codec, np.full(64, most, np.float32))
    assert np.isfinite(equal).all()
    signs = np.random.default_rng(0).choice([-1, 1], 64)
    _, mixed = encoded(codec, np.float32(signs * most))
    assert np.isfinite(mixed).all()

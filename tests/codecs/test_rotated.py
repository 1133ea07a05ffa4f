"""Tests random rotations against Hadamard matrices that are written down by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c
from pipejax.codecs._rotated import hadamard

from ..helpers import assert_bits_equal
from .conformance import KEY, normal


def matrix(n):
    """Returns the matrix whose element (i, j) is -1 if i and j share an odd number."""
    shared = np.arange(n)[:, None] & np.arange(n)
    odd = np.array([[bin(x).count("1") % 2 for x in row] for row in shared])
    return (1 - 2 * odd).astype(np.float32)


def signs(payload, block):
    """Returns the signs that follow from the last four bytes of a payload."""
    seed = np.asarray(payload)[-4:].view(np.uint32)[0]
    bits = jax.random.bits(jax.random.key(seed), (block // 8,), jnp.uint8)
    # As in all payloads, bit i of byte j belongs to element `i (block / 8) + j`.
    return np.concatenate([1.0 - 2 * ((bits >> i) & 1) for i in range(8)])


def decoded(codec, x, seed=0, steps=1):
    """Returns what a codec sends in each of some steps with the same vector."""

    def step(state, _):
        payload, state = codec.encode(x, state)
        return state, codec.decode(payload, x.size)

    state = codec.init(x.size, jnp.uint32(seed))
    return np.asarray(jax.lax.scan(step, state, length=steps)[1])


@pytest.mark.parametrize("n", [8, 16, 32, 1024])
def test_product_equals_a_product_with_the_hadamard_matrix(n):
    """The matrix product has n terms, which are scaled by sqrt(n) all together."""
    x = normal(3 * n).reshape(3, n)
    product = np.asarray(hadamard(jnp.asarray(x)))
    close = {"rtol": 0, "atol": 1e-5}
    np.testing.assert_allclose(product, x @ matrix(n) / np.sqrt(n), **close)
    np.testing.assert_allclose(hadamard(jnp.asarray(product)), x, **close)


@pytest.mark.parametrize("inner", [c.int4(8), c.cast("float32"), c.truncate()])
def test_payload_holds_the_rotated_vector_and_the_seed(inner):
    """Sums of small integers, divided by 4, are exact in float32."""
    n, block = 64, 16
    codec = c.rotated(inner, KEY, block)
    x = np.random.default_rng(0).integers(-9, 10, n).astype(np.float32)
    payload, _ = jax.jit(codec.encode)(x, codec.init(n, jnp.uint32(5)))
    assert payload.nbytes == codec.size(n) == inner.size(n) + 4
    in_bytes = np.asarray(payload).view(np.uint8)
    drawn = signs(in_bytes, block)
    y = ((x.reshape(-1, block) * drawn) @ matrix(block) / 4).reshape(-1)
    wanted, _ = inner.encode(jnp.float32(y), ())
    assert_bits_equal(payload[: wanted.size], wanted)
    got = np.asarray(inner.decode(wanted, n)).reshape(-1, block)
    back = (got @ matrix(block) / 4 * drawn).reshape(-1)
    found = jax.jit(codec.decode, static_argnums=1)(payload, n)
    np.testing.assert_allclose(found, back, rtol=0, atol=1e-5)


def test_small_elements_beside_an_outlier_are_kept():
    """int4 rounds every small element to zero in every step; rotated, none is lost.

    The error of a rotated element is at most a level, s / 7. The largest of 1,024
    normal numbers is less than 5 deviations, and these are `|x| / sqrt(1024)`.
    """
    x = jnp.full(2048, 0.3).at[::1024].set(7.0)
    plain, steps = c.int4(1024), 400
    assert not decoded(plain, x)[0, x < 1].any()
    got = decoded(c.rotated(plain, KEY), x, steps=steps)
    deviation = 5 / 7 * float(jnp.linalg.norm(x[:1024])) / 32
    assert np.abs(got[0] - x).mean() < deviation
    # Fresh signs make the errors of the steps independent, so that the mean over the
    # steps is sqrt(400) times as accurate. 5 deviations are exceeded by chance in one
    # of 3,000 vectors.
    assert np.abs(got.mean(axis=0) - x).max() < 5 * deviation / np.sqrt(steps)


def test_error_of_heavy_tails_equals_the_error_of_normal_numbers():
    """The relative error of int4 is half as large again with heavy tails."""
    rng = np.random.default_rng(0)
    errors = {}
    for name, x in {
        "normal": rng.normal(size=2**14),
        "heavy": rng.standard_t(2, size=2**14),
    }.items():
        x = jnp.float32(x)
        kinds = {"plain": c.int4(), "rotated": c.rotated(c.int4(), KEY)}
        for kind, codec in kinds.items():
            lost = decoded(codec, x)[0] - x
            errors[name, kind] = float(jnp.linalg.norm(lost) / jnp.linalg.norm(x))
    assert errors["heavy", "plain"] > 1.3 * errors["normal", "plain"]
    assert errors["heavy", "rotated"] < 1.05 * errors["normal", "rotated"]


def test_signs_differ_between_steps_and_seeds():
    codec, x = c.rotated(c.cast("float32"), KEY, 64), jnp.ones(64)
    drawn = []
    for seed in (0, 1):
        state = codec.init(64, jnp.uint32(seed))
        for _ in range(2):
            payload, state = codec.encode(x, state)
            drawn.append(tuple(signs(np.asarray(payload).view(np.uint8), 64)))
    assert len(set(drawn)) == 4


def test_state_of_the_codec_inside_is_kept():
    """The noise of stochastic rounding differs from step to step."""
    inner = c.stochastic(c.int4(8), KEY)
    codec = c.rotated(inner, KEY, 16)
    state = codec.init(16, jnp.uint32(3))
    assert_bits_equal(state.codec, inner.init(16, jnp.uint32(3)))
    _, after = jax.jit(codec.encode)(normal(16), state)
    _, wanted = jax.jit(inner.encode)(normal(16), state.codec)
    assert_bits_equal(after.codec, wanted)


def test_lengths_fit_both_kinds_of_blocks():
    assert c.rotated(c.int4(64), KEY, 16).multiple == 128
    assert c.rotated(c.int4(64), KEY).multiple == 1024


def test_range_of_float16_is_widened_by_the_devices():
    assert c.rotated(c.cast("float16"), KEY).of(devices=8).codec.headroom == 8

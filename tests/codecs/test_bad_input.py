"""Tests every ValueError of the codecs by its message."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c

from .conformance import KEY, SHAPES, N


def rejects(start):
    """Expects a ValueError whose message begins with `start`."""
    return pytest.raises(ValueError, match="^" + re.escape(start))


@pytest.mark.parametrize("bits", [0, 3, 5, 16, 32, -8, True, 4.0, "8", None])
def test_bits_must_be_8_4_2_or_1(bits):
    with rejects(f"`bits` must be 8, 4, 2 or 1; got {bits!r}. For 16 bits, use"):
        c.quantize(bits)


@pytest.mark.parametrize("block", [0, 1, 4, 12, 100, -8, True, 64.0, "64", None])
@pytest.mark.parametrize(
    "codec",
    [
        c.int8,
        c.int4,
        c.int2,
        c.fp4,
        c.fp8,
        c.sign,
        lambda block: c.rotated(c.int8(), KEY, block),
    ],
)
def test_block_must_be_a_power_of_two(codec, block):
    with rejects(f"`block` must be a power of two of at least 8; got {block!r}. Sizes"):
        codec(block=block)


@pytest.mark.parametrize("format", ["e4m4", "float8_e4m3fn", "", None])
def test_format_must_be_e4m3_or_e5m2(format):
    said = "`format` must be 'e4m3' or 'e5m2', the formats of eight bits; got"
    with rejects(f"{said} {format!r}."):
        c.fp8(format)


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e5m2", "bool"])
def test_dtype_must_be_a_wide_float(dtype):
    said = f"`dtype` must be float32, bfloat16 or float16; got {dtype}. For eight bits"
    with rejects(said):
        c.cast(dtype)


def test_dtype_must_be_known():
    with rejects("`dtype` must be float32, bfloat16 or float16; got 'float17'. For"):
        c.cast("float17")


@pytest.mark.parametrize("scaled", ["no", 1, None])
def test_scaled_must_be_a_flag(scaled):
    with rejects(f"`scaled` must be True or False, got {scaled!r}."):
        c.random_k(2, KEY, scaled=scaled)


SPARSE = {"top_k": c.top_k, "random_k": lambda k: c.random_k(k, KEY)}
sparse = pytest.mark.parametrize("codec", SPARSE.values(), ids=SPARSE)


@sparse
@pytest.mark.parametrize("k", [0, -1, 0.0, 1.0, 1.5, -0.1, True, False, "5", None])
def test_k_must_be_a_positive_integer_or_a_fraction(codec, k):
    said = "`k` must be an integer of at least 1, or a fraction between 0 and 1 such as"
    with rejects(f"{said} 0.01; got {k!r}."):
        codec(k)


@sparse
def test_k_above_the_length_of_the_vector_is_refused(codec):
    said = "`k` must be at most the 4 elements of which it chooses; got 5. Choose a"
    with rejects(said):
        codec(5).size(4)
    with rejects(said):
        codec(5).encode(jnp.zeros(4), codec(5).init(4, jnp.uint32(0)))


@pytest.mark.parametrize(
    "codec", [c.top_k(0.5), c.random_k(0.5, KEY)], ids=["top_k", "random_k"]
)
def test_payloads_beyond_int32_are_refused(codec):
    with rejects(
        "`codec` must have at most 2,147,483,647 elements in the payload, which is as"
        " many as int32 can index; got 2,147,483,648. Choose an algorithm"
    ):
        codec.size(2**32)


@pytest.mark.parametrize("rank", [0, -1, 1.0, True, "2", None])
@pytest.mark.parametrize("codec", [c.power_sgd, c.acp_sgd])
def test_rank_must_be_a_positive_integer(codec, rank):
    with rejects(f"`rank` must be an integer of at least 1; got {rank!r}. Ranks of 1"):
        codec(rank, KEY)


KEYED = {
    "random_k": lambda key: c.random_k(1, key),
    "power_sgd": lambda key: c.power_sgd(1, key),
    "stochastic": lambda key: c.stochastic(c.int8(), key),
    "rotated": lambda key: c.rotated(c.int8(), key),
}
NO_KEYS = {
    "a seed": 0,
    "an array": jnp.zeros(2, jnp.uint32),
    "an old key": jax.random.PRNGKey(0),
    "two keys": jax.random.split(KEY),
    "nothing": None,
}


@pytest.mark.parametrize("codec", KEYED.values(), ids=KEYED)
@pytest.mark.parametrize("key", NO_KEYS.values(), ids=NO_KEYS)
def test_key_must_be_a_single_key(codec, key):
    with rejects(f"`key` must be a single key from jax.random.key(seed); got {key!r}."):
        codec(key)


@pytest.mark.parametrize(
    "codec",
    [
        c.truncate(),
        c.fp8(),
        c.sign(),
        c.top_k(1),
        # These codecs do not round, or round to something else than the upper bits of
        # float32.
        c.cast("float32"),
        c.cast("float16"),
        c.stochastic(c.int8(), KEY),
        c.error_feedback(c.int8()),
        "int8",
        None,
    ],
)
def test_stochastic_needs_a_codec_with_levels(codec):
    with rejects("`codec` must round to levels, as pj.codecs.int8(), int4(), "):
        c.stochastic(codec, KEY)


@pytest.mark.parametrize("codec", [c.error_feedback(c.sign()), c.sign, "sign", None])
def test_error_feedback_needs_a_codec_without_feedback(codec):
    said = "`codec` must be a codec without feedback, such as pj.codecs.sign(); got"
    with rejects(f"{said} {codec!r}."):
        c.error_feedback(codec)


@pytest.mark.parametrize("decay", [0, 0.0, -0.5, 1.1, float("nan"), True, "1", None])
def test_decay_must_be_a_positive_fraction(decay):
    with rejects(f"`decay` must be a number above 0 and at most 1; got {decay!r}. Use"):
        c.error_feedback(c.sign(), decay)


def test_error_feedback_of_a_scaled_codec_is_refused():
    with rejects("`codec` must not scale its values up under error feedback, because"):
        c.error_feedback(c.random_k(1, KEY))


@pytest.mark.parametrize(
    "codec",
    [
        *(c.error_feedback(c.int4()), c.power_sgd(1, KEY), c.random_k(1, KEY)),
        *(c.int4, "int4", None),
    ],
)
def test_codec_inside_a_codec_must_not_be_linear(codec):
    must = "must be a codec such as pj.codecs.int4(), neither linear nor with error"
    with rejects(f"`codec` {must}"):
        c.rotated(codec, KEY)
    with rejects(f"`values` {must}"):
        c.top_k(1, values=codec)


@pytest.mark.parametrize("chunk", [0, -1, 4097, 8.0, True, "8", None])
def test_chunk_must_have_at_most_4096_elements(chunk):
    with rejects("`chunk` must be an integer from 1 to 4096, since places in a chunk"):
        c.top_k(1, chunk=chunk)


def uses(codec, n):
    """Returns the methods that depend on the shapes, as functions to call."""
    return {
        "size": lambda: codec.size(n),
        "round_sizes": lambda: codec.round_sizes(n),
        "init": lambda: codec.init(n, jnp.uint32(0)),
        "encode": lambda: codec.encode(jnp.zeros(n), jnp.zeros(1)),
    }


@pytest.mark.parametrize("use", uses(None, 0))
@pytest.mark.parametrize("wrap", [lambda codec: codec, c.error_feedback])
def test_power_sgd_without_shapes_is_refused(wrap, use):
    codec = wrap(c.power_sgd(1, KEY))
    state = jnp.zeros(1)
    if wrap is c.error_feedback:
        state = c.ErrorFeedbackState(jnp.zeros(N, jnp.float32), state)
    calls = uses(codec, N) | {"encode": lambda: codec.encode(jnp.zeros(N), state)}
    with rejects("`power_sgd` must know the shapes of the leaves; got none. Choose an"):
        calls[use]()


@pytest.mark.parametrize("use", uses(None, 0))
def test_power_sgd_of_a_part_is_refused(use):
    codec = c.power_sgd(1, KEY).of(SHAPES)
    said = f"`power_sgd` must be given whole leaves, {N} elements; got a vector of 256."
    with rejects(said):
        uses(codec, 256)[use]()


def test_numbers_of_numpy_are_numbers():
    assert c.quantize(np.int64(4)) == c.quantize(4)
    assert c.top_k(np.float32(0.25)) == c.top_k(0.25)
    half = c.error_feedback(c.int8(), np.float32(0.5))
    assert half == c.error_feedback(c.int8(), 0.5)

"""Tests how many bytes each named codec sends for a matrix of 256 x 256 elements."""

import jax
import pytest

from pipejax import codecs

N = 256 * 256
# The bytes follow from the formats: codes, scales, places, seeds and factors.
BYTES = {
    "bf16": 2 * N,
    "truncate": 2 * N,
    "quantize": N + 2 * 4,  # a minimum and a distance
    "int8": N + N // 256 * 4,
    "int4": N // 2 + N // 64 * 4,
    "stochastic_int4": N // 2 + N // 64 * 4,
    "rotated_int4": N // 2 + N // 64 * 4 + 4,  # with the seed of the signs
    "fp4": N // 2 + N // 32 * 4,
    "int2": N // 4 + N // 256 * 4,
    "fp8_e4m3": N + N // 256 * 4,
    "fp8_e5m2": N + N // 256 * 4,
    "sign": N // 8 + N // 1024 * 4,
    # 41 of each of 16 chunks, each with its place of 12 bits and its value of 16.
    "top_k": 16 * 41 * (12 + 16) // 8,
    "random_k": 649 * 4 + 4,  # of parts of 101, with the seed of their places
    "power_sgd": 4 * (256 + 256) * 4,  # two factors of rank 4
    "acp_sgd": 4 * (256 + 256) * 4,  # one of them suffices where both are known
}


@pytest.mark.parametrize("name", BYTES)
def test_named_codec_has_the_listed_size_in_bytes(name):
    assert codecs.named(name).of(((256, 256),)).size(N) == BYTES[name]


def test_every_named_codec_is_in_the_list_of_sizes():
    assert list(codecs.NAMES) == list(BYTES)


def test_fp8_names_give_their_formats():
    """Both formats send as many bytes, and differ in their largest number."""
    tops = [codecs.named(name).top for name in ("fp8_e4m3", "fp8_e5m2")]
    assert tops == [448, 57344]


def test_key_is_given_only_to_the_stochastic_int4():
    states = [
        codecs.named(name).init(64, jax.numpy.uint32(0))
        for name in ("int4", "stochastic_int4")
    ]
    assert [bool(jax.tree.leaves(state)) for state in states] == [False, True]


def test_unknown_name_is_refused():
    message = r"`name` must be one of bf16, truncate, .*, acp_sgd; got 'int9'\."
    with pytest.raises(ValueError, match=message):
        codecs.named("int9")

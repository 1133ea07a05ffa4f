"""Tests which arrays travel in one collective."""

import jax
import jax.numpy as jnp
import pytest

from pipejax.collectives._combined import Combined

from ..helpers import assert_bits_equal

ARRAYS = [
    jnp.arange(6, dtype="float32").reshape(2, 3),  # 24 bytes
    jnp.bfloat16([1, 2]),  # 4
    jnp.float32([7]),  # 4
    jnp.arange(100, dtype="float32"),  # 400
    jnp.bfloat16([[3]]),  # 2
]


@pytest.mark.parametrize(
    ("threshold", "members", "sizes"),
    [
        (0, ((0,), (1,), (2,), (3,), (4,)), (24, 4, 4, 400, 2)),
        (4, ((0,), (1,), (2,), (3,), (4,)), (24, 4, 4, 400, 2)),
        (5, ((0,), (1, 4), (2,), (3,)), (24, 6, 4, 400)),
        (25, ((0, 2), (1, 4), (3,)), (28, 6, 400)),
        (1000, ((0, 2, 3), (1, 4)), (428, 6)),
    ],
)
def test_small_arrays_share_one_message_for_each_dtype(threshold, members, sizes):
    forms = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]
    groups = Combined.of(forms, threshold)
    assert (groups.members, groups.bytes) == (members, sizes)
    sent = groups.combine(ARRAYS)
    assert [x.nbytes for x in sent] == list(sizes)
    assert_bits_equal(list(groups.separate(sent)), ARRAYS)


def test_arrays_without_elements_are_not_sent():
    arrays = [jnp.zeros((0, 3)), jnp.arange(3.0), jnp.zeros((2, 0), jnp.bfloat16)]
    forms = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    groups = Combined.of(forms, 0)
    assert groups.members == ((1,),)
    assert_bits_equal(list(groups.separate(groups.combine(arrays))), arrays)

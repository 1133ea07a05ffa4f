"""Tests the codecs that send all or nothing, in place of another codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs as c
from pipejax.codecs._error_feedback import ErrorFeedback
from pipejax.codecs._passing import Passing

from ..helpers import assert_bits_equal, x64

X, KEPT = np.float32([1, -2, 3, 0.1]), np.float32([0.5, 0, -3, 0.2])
SHAPES = ((2, 2), (3,))


@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_is_sent_or_all_is_kept(passes, dtype):
    """Vector and residual are added in their own dtype."""
    x, kept = X.astype(dtype), KEPT.astype(dtype)
    with x64():
        codec = ErrorFeedback(Passing(c.sign(8), passes)).of(dtype=dtype)
        state = c.ErrorFeedbackState(jnp.asarray(kept), ())
        payload, after = codec.encode(jnp.asarray(x), state)
        sent = codec.decode(payload, 4)
    everything, nothing = x + kept, np.zeros(4, dtype)
    assert_bits_equal(sent, everything if passes else nothing)
    assert_bits_equal(after.residual, nothing if passes else everything)
    assert payload.nbytes == codec.size(4) == x.nbytes


def test_vectors_are_cut_as_for_the_codec():
    """The residual then has the layout in which the replaced codec keeps its own."""
    assert Passing(c.int8(64), True).multiple == c.int8(64).multiple == 64
    power_sgd = Passing(c.power_sgd(1, jax.random.key(0)), True)
    assert power_sgd.needs_leaves
    assert [x.shape for x in power_sgd.of(SHAPES).leaves(jnp.zeros(7))] == [*SHAPES]


@pytest.mark.parametrize("passes", [True, False])
def test_one_round_in_place_of_two(passes):
    """The sum of two devices' vectors is rebuilt as leaves, or zeros are."""
    codec = Passing(c.power_sgd(1, jax.random.key(0)), passes).of(SHAPES)
    x, y = np.arange(7, dtype=np.float32), np.float32([7, 6, 5, 4, 3, 2, 1])
    assert (codec.rounds, codec.round_sizes(7)) == (1, (7,))
    assert Passing(c.int8(), passes).rounds == 0
    total = sum(codec.project(codec.leaves(jnp.asarray(v)), (), ()) for v in (x, y))
    matrix, vector = codec.rebuild((), (total,), 7)
    np.testing.assert_array_equal(matrix, passes * (x + y)[:4].reshape(2, 2))
    np.testing.assert_array_equal(vector, passes * (x + y)[4:])

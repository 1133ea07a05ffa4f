"""Tests the argument `codec`: valid values, and a warning at the user's line."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import codecs
from pipejax.codecs import check_codec


def an_algorithm(codec):
    """Stands for a function that a user calls: the warning points at its caller."""
    return check_codec(codec)


def test_no_codec_sends_all_bits():
    codec, x = an_algorithm(None), np.float32([1 / 3, -0.0, np.nan])
    payload, _ = codec.encode(jnp.asarray(x), ())
    assert payload.nbytes == codec.size(3) == 12
    np.testing.assert_array_equal(codec.decode(payload, 3).view("u4"), x.view("u4"))


def test_codec_is_returned_unchanged():
    codec = codecs.int8(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert an_algorithm(codec) is codec
        feedback = codecs.error_feedback(codecs.sign())
        assert an_algorithm(feedback) is feedback


@pytest.mark.parametrize("bad", ["int8", 8, codecs.int8])
def test_values_other_than_codecs_are_refused(bad):
    with pytest.raises(ValueError, match=r"`codec` must be a codec such as .*; got "):
        an_algorithm(bad)


def test_biased_codec_warns_at_the_line_of_the_user():
    with pytest.warns(UserWarning, match=r"Sign is biased.*error_feedback") as caught:
        an_algorithm(codecs.sign())
    assert caught[0].filename == __file__

"""Tests that codecs are found by name, and get error feedback where they need it."""

import pytest

from pipejax import codecs, timing
from pipejax.cli._candidates import USUAL, candidates, feeds_back


def test_feedback_is_where_training_may_fail_without():
    found = candidates(["sign", "bf16", "int8"])
    assert list(found) == ["sign", "bf16", "int8"]
    assert found["int8"] == codecs.named("int8")
    assert found["bf16"] == codecs.named("bf16")
    assert found["sign"] == codecs.error_feedback(codecs.named("sign"))


def test_of_all_that_have_a_name_none_is_left_in_need():
    found = candidates(codecs.NAMES)
    assert found.keys() == codecs.NAMES.keys()
    assert not [name for name, codec in found.items() if codec.needs_feedback]


def test_int4_has_feedback_though_it_trains_without():
    assert candidates(["int4"]) == {"int4": codecs.error_feedback(codecs.int4())}
    fed = [name for name in codecs.NAMES if feeds_back(name)]
    assert fed == ["truncate", "int4", "sign", "top_k", "power_sgd"]


def test_the_usual_codecs_are_those_with_assumed_speeds():
    assert tuple(timing.assumed(2, 1e9).codecs) == USUAL


def test_no_names_are_no_codecs():
    assert candidates([]) == {}


def test_a_name_that_no_codec_has():
    with pytest.raises(ValueError, match="`name` must be one of bf16, truncate"):
        candidates(["bf16", "int9"])

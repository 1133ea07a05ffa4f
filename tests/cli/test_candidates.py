"""Tests that codecs are found by name, and get error feedback where they need it."""

import pytest

from pipejax import codecs, timing
from pipejax.cli._candidates import USUAL, candidates, feeds_back, is_measured
from pipejax.cli._usage import UsageError


def test_feedback_is_added_to_sign_and_not_to_bf16_or_int8():
    found = candidates(["sign", "bf16", "int8"])
    assert list(found) == ["sign", "bf16", "int8"]
    assert found["int8"] == codecs.named("int8")
    assert found["bf16"] == codecs.named("bf16")
    assert found["sign"] == codecs.error_feedback(codecs.named("sign"))


def test_candidates_of_all_codecs_need_no_more_feedback():
    found = candidates(codecs.NAMES)
    assert found.keys() == codecs.NAMES.keys()
    assert not [name for name, codec in found.items() if codec.needs_feedback]


def test_feedback_is_added_to_int4_although_training_works_without():
    assert candidates(["int4"]) == {"int4": codecs.error_feedback(codecs.int4())}
    fed = [name for name in codecs.NAMES if feeds_back(name)]
    assert fed == ["truncate", "int4", "int2", "sign", "top_k", "power_sgd", "acp_sgd"]


def test_usual_codecs_are_the_codecs_with_assumed_speeds():
    assert tuple(timing.assumed(2, 1e9).codecs) == USUAL


def test_empty_list_of_names_gives_no_codecs():
    assert candidates([]) == {}


def test_unknown_codec_is_refused():
    with pytest.raises(UsageError, match=r"`--codecs` must be .*bf16, .*; got int9"):
        candidates(["bf16", "int9"])


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"width": 2, "codec": "int8"}, True),
        ({"width": 2, "codec": "fp8_e4m3"}, False),
        ({"width": 2, "codec": "int4", "algorithm": "psum"}, False),
        ({"width": 2, "codec": "int4", "shard_optimizer": True}, False),
        ({"width": 1, "codec": "fp8_e4m3"}, True),
        ({"codec": "int4", "sync_every": 4, "overlap_steps": 4}, True),
        ({"codec": "int8", "sync_every": 4, "overlap_steps": 4}, False),
        ({"sync_every": 4, "overlap_steps": 4}, True),
    ],
)
def test_measured_ways_are_in_the_benchmarks(changes, measured):
    """In local steps, commands give error feedback to int4, and none to int8."""
    way = timing.TrainConfig(**{"width": 1, "algorithm": "two_shot"} | changes)
    assert is_measured(way) == measured

"""Tests the time of a local step against numbers by hand."""

import pytest

from pipejax import timing

COMPUTE = timing.Compute(0.25, 0.5, update=0.25)


@pytest.mark.parametrize(
    ("every", "overlap", "wanted"),
    [
        (1, 0, 9.0),  # computes 1 s, and waits 8 s
        (4, 0, 3.0),
        (4, 4, 2.0),  # four steps hide half of the exchange
        (8, 8, 1.0),
        (16, 8, 1.0),
        (16, 4, 1.25),  # (8 + 12) / 16
    ],
)
def test_step_time_equals_numbers_by_hand(every, overlap, wanted):
    exchange = timing.Duration(0, 8.0, 0, 0, 0)
    assert timing.local_step_time(COMPUTE, exchange, every, overlap) == wanted


def test_every_chunk_takes_the_latency_of_an_exchange():
    exchange = timing.Duration(0.5, 6.0, 0, 0, 0.5)
    # Eight chunks of 1 + 6 / 8 s, beside 8 s of compute.
    assert timing.local_step_time(COMPUTE, exchange, 8, 8) == (8 + 6) / 8


def test_codec_on_the_core_of_the_model_adds_to_hidden_steps():
    exchange = timing.Duration(0, 2.0, 0, 1.0, 0)
    times = [
        timing.local_step_time(COMPUTE, exchange, 4, overlap, one_core=True)
        for overlap in (0, 4)
    ]
    assert times == [(3 + 4) / 4, (4 + 1) / 4]


@pytest.mark.parametrize(("every", "overlap"), [(0, 0), (2, 3), (2, -1)])
def test_bad_rounds_are_refused(every, overlap):
    with pytest.raises(ValueError, match=r"`(sync_every|overlap_steps)` must be"):
        timing.local_step_time(COMPUTE, timing.Duration(0, 1, 0, 0, 0), every, overlap)

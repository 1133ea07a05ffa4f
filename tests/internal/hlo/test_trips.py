"""Tests how often loops run, as a backend prints it or as it is counted."""

import pytest

from ...overlap import DOT, FLOPS, work

LOOP = """
    %cond (c: (s32[], f32[8,8])) -> pred[] {
      %c = (s32[], f32[8,8]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%c), index=0
      %n = s32[] constant(7)
      ROOT %lt = pred[] compare(%i, %n), direction=LT
    }

    %body (b: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
      %b = (s32[], f32[8,8]{1,0}) parameter(0)
      %j = s32[] get-tuple-element(%b), index=0
      %p = f32[8,8]{1,0} get-tuple-element(%b), index=1
      %two = s32[] constant(2)
      %next = s32[] add(%j, %two)
      %d = f32[8,8]{1,0} DOT
      ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%next, %d)
    }
""".replace("DOT", DOT)
WHILE = """
    %zero = s32[] constant(1)
    %first = s32[] copy(%zero)
    %init = (s32[], f32[8,8]{1,0}) tuple(%first, %p)
    %w = (s32[], f32[8,8]{1,0}) while(%init), condition=%cond, body=%body
"""


def test_trip_count_is_read_from_the_backend_config():
    config = ', backend_config={"known_trip_count":{"n":"12"}}'
    found, _ = work(WHILE.rstrip() + config, LOOP)
    assert (found.flops, found.matmuls) == (12 * FLOPS, 12)


def test_trip_count_of_a_counting_loop_is_found():
    found, uncounted = work(WHILE, LOOP)
    assert found.flops == 3 * FLOPS  # the loop runs for i = 1, 3, 5
    assert not uncounted


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        ("direction=LT", "direction=NE"),
        ("%first = s32[] copy(%zero)", "%first = s32[] negate(%zero)"),
        ("%next = s32[] add", "%next = s32[] multiply"),
        # The compared element is another one than the counter, and the step is down.
        (
            "%j = s32[] get-tuple-element(%b), index=0",
            "%j = s32[] get-tuple-element(%b), index=1",
        ),
        ("%two = s32[] constant(2)", "%two = s32[] constant(-2)"),
        ("%n = s32[] constant(7)", "%n = s32[] get-tuple-element(%c), index=0"),
    ],
)
def test_loop_of_unknown_length_counts_once_and_is_named(known, unknown):
    assert known in WHILE + LOOP
    found, uncounted = work(WHILE.replace(known, unknown), LOOP.replace(known, unknown))
    assert found.flops == FLOPS
    assert uncounted == {"w": "a loop of unknown length, counted once"}


def test_trip_count_other_than_a_number_is_refused():
    config = ', backend_config={"known_trip_count":{"n":"many"}}'
    with pytest.raises(ValueError, match=r"its trip count is .*many.*\n%w = "):
        work(WHILE.rstrip() + config, LOOP)

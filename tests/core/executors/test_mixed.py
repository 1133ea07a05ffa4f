"""
Tests programs that are drawn at random, against NumPy by hand.

Each has one to four train steps of many kinds, which step, drain, are dropped and made
anew, are evaluated between steps, saved and restored in a random order. A failing test
says the seed of its program. This runs the program of seed 137 alone, on one process
and on two: `python -m tests.core.executors.mixed 137`
"""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from . import mixed
from .by_hand import ByHand
from .group import Group
from .programs import Program

SHARE = 30
"""Programs of one test. They share train steps, see `Program.drawn`."""


@pytest.fixture(scope="module")
def group():
    """Returns processes that run one program after another."""
    with contextlib.closing(Group(2, devices=2)) as group:
        yield group


def test_quick_random_programs_equal_numpy_on_one_process(tmp_path):
    for seed in mixed.QUICK:
        with mixed.alone(seed):
            assert mixed.drawn(seed, tmp_path / str(seed)) == []


@pytest.mark.full  # 30 programs take a minute of the processor
@pytest.mark.parametrize("first", range(0, mixed.COUNT, SHARE))
def test_all_random_programs_equal_numpy_on_one_and_two_processes(
    group, tmp_path, first
):
    for seed in range(first, first + SHARE):
        with mixed.alone(seed):
            one, two = tmp_path / f"one{seed}", tmp_path / f"two{seed}"
            assert mixed.drawn(seed, one) == []
            assert group.ask("drawn", seed, two) == [[], []]


def test_quick_programs_cover_all_kinds():
    def names(seeds):
        return set().union(*(Program.drawn(seed).names for seed in seeds))

    assert names(mixed.QUICK) == names(range(mixed.COUNT))


def test_seed_of_a_failing_program_is_reported():
    with pytest.raises(AssertionError) as caught, mixed.alone(137):
        raise AssertionError
    (note,) = caught.value.__notes__
    assert note.endswith("Run it alone: python -m tests.core.executors.mixed 137")


RIGHT = ByHand(
    {"w": np.ones((64, 65)), "b": np.ones(65)},
    optimizer="momentum",
    rule="linearized",
    stateful=True,
    weighted=True,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 3},
        {"width": 1},
        {"rule": False},
        {"rule": "own"},  # parts of weight 0
        {"optimizer": "sgd"},
        {"optimizer": "adam"},
        {"stateful": False},
        {"weighted": False},
        {"microbatches": 2},  # the model state moves twice
    ],
    ids=lambda wrong: "-".join(map(str, *wrong.items())),
)
def test_wrong_rules_differ_far_beyond_the_tolerance(wrong):
    """A step by another rule ends with other parameters."""
    ends = []
    for hand in (dataclasses.replace(RIGHT), dataclasses.replace(RIGHT, **wrong)):
        play = mixed.Play(Program(0, 2, (), ()), "")
        for _ in range(6):
            hand.step([play.part(weighted=True) for _ in range(2)])
        hand.drain()
        ends.append(hand.params)
    errors = jax.tree.map(lambda a, b: np.abs(a - b).max(), *ends)
    assert max(errors.values()) > 10 * mixed.TOLERANCE

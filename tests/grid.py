"""
Makes grids of cases: `pytest` runs every pair of values, the full run all cases.

A defect seldom needs three parameters to show: one value is enough, or two values that
do not work together. `pytest` therefore runs a covering array: a small set of
combinations in which every two values of any two parameters meet, or fewer where a case
is costly. `make test` runs one of them, and `make test-all` all combinations.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def grid(strength: int = 2, /, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """
    Parametrizes a test with all combinations, and marks most of them as `full`.

    Args:
      strength: The number of parameters whose values all meet in the quick run. 1 takes
        every value at least once, for parameters that do not affect one another.
        0 takes the first case alone, where other quick tests have the values.
      **parameters: The values of each parameter.

    >>> cases = grid(a="xy", b="12", c="+-").args[1]
    >>> ["".join(case.values) for case in cases if not case.marks]
    ['x1+', 'x2-', 'y1-', 'y2+']
    >>> cases = grid(1, a="xyz", b="12").args[1]
    >>> ["".join(case.values) for case in cases if not case.marks]
    ['x1', 'y2', 'z1']
    >>> cases = grid(0, a="xyz", b="12").args[1]
    >>> ["".join(case.values) for case in cases if not case.marks]
    ['x1']
    """
    cases = itertools.product(*parameters.values())
    return pytest.mark.parametrize(list(parameters), thinned(cases, strength))


def thinned(cases: Iterable[Sequence[Any]], strength: int = 2) -> list[Any]:
    """
    Marks as `full` every case whose pairs of values all occur in the other cases.

    Args:
      cases: The cases, with a value for each parameter. Combinations may be missing.
      strength: 2 for pairs of values, 1 for single values, or 0 for the first case.

    Returns:
      All cases in their order, for `pytest.mark.parametrize`.
    """
    found = list(cases)
    kept = covering([tuple(map(repr, case)) for case in found], strength)
    return [
        pytest.param(*case, marks=() if number in kept else pytest.mark.full)
        for number, case in enumerate(found)
    ]


def covering(cases: Sequence[tuple[str, ...]], strength: int) -> set[int]:
    """Returns the numbers of cases that together contain all combinations of values.

    The search is greedy: it takes the first case with the most new combinations.
    """
    # Each case covers the combinations of `strength` of its (parameter, value) pairs.
    missing = [
        set(itertools.combinations(enumerate(case), min(strength, len(case))))
        for case in cases
    ]
    kept = set()
    while any(missing):
        best = max(range(len(cases)), key=lambda number: len(missing[number]))
        kept.add(best)
        new = set(missing[best])
        for left in missing:
            left -= new
    return kept


def each(names: Iterable[Any], *, full: Iterable[Any]) -> list[Any]:
    """Marks as `full` the names of variants, which another name tests already."""
    left_out = set(full)
    return [
        pytest.param(name, marks=pytest.mark.full if name in left_out else ())
        for name in names
    ]

"""Grids of cases: every pair of values in the quick run, every combination in the full.

A defect seldom needs three parameters to show: one value is enough, or two that do not
go together. The quick run therefore takes a covering array, a small set of combinations
in which every two values of any two parameters meet. `make test-all` takes all of them.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def grid(strength: int = 2, /, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations; the covering array is not `full`.

    Args:
      strength: of how many parameters all values meet in the quick run. 1 takes every
        value at least once, for parameters that do not act on one another.
      **parameters: the values of each.

    >>> cases = grid(a="xy", b="12", c="+-").args[1]
    >>> ["".join(case.values) for case in cases if not case.marks]
    ['x1+', 'x2-', 'y1-', 'y2+']
    >>> cases = grid(1, a="xyz", b="12").args[1]
    >>> ["".join(case.values) for case in cases if not case.marks]
    ['x1', 'y2', 'z1']
    """
    cases = itertools.product(*parameters.values())
    return pytest.mark.parametrize(list(parameters), thinned(cases, strength))


def thinned(cases: Iterable[Sequence[Any]], strength: int = 2) -> list[Any]:
    """Marks as `full` every case whose pairs of values all occur in the other cases.

    Args:
      cases: a value for each parameter; combinations may be missing.
      strength: 2 for pairs; 1 for single values.

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
    """Returns the numbers of cases that together have all that is to be covered.

    The search is greedy: it takes the first case with the most that is new.
    """
    # What a case covers: combinations of `strength` of its (parameter, value).
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


def each(names: Iterable[str], *, full: Iterable[str]) -> list[Any]:
    """Marks those names as `full` that only vary what another one tests."""
    left_out = set(full)
    return [
        pytest.param(name, marks=pytest.mark.full if name in left_out else ())
        for name in names
    ]

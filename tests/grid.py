"""Grids of cases: every pair of values in the quick run, every combination in the full.

A defect seldom needs three parameters to show: one value is enough, or two that do not
go together. The quick run therefore takes a covering array, a small set of combinations
in which every two values of any two parameters meet. `make test-all` takes all of them.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def grid(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations; those beyond the pairs are `full`.

    >>> cases = grid(a="xy", b="12", c="+-").args[1]
    >>> ["".join(case.values) for case in cases if not case.marks]
    ['x1+', 'x2-', 'y1-', 'y2+']
    """
    names, values = zip(*parameters.items(), strict=True)
    return pytest.mark.parametrize(names, pairwise(itertools.product(*values)))


def pairwise(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Marks as `full` every case whose pairs of values all occur in the other cases.

    Args:
      cases: a value for each parameter; combinations may be missing.

    Returns:
      All cases in their order, for `pytest.mark.parametrize`.
    """
    found = list(cases)
    kept = covering([tuple(map(repr, case)) for case in found])
    return [
        pytest.param(*case, marks=() if number in kept else pytest.mark.full)
        for number, case in enumerate(found)
    ]


def covering(cases: Sequence[tuple[str, ...]]) -> set[int]:
    """Returns the numbers of cases that together have every pair of values of all.

    The search is greedy: it takes the first case with the most pairs that are new.
    """
    missing = [set(_pairs(case)) for case in cases]
    kept = set()
    while any(missing):
        best = max(range(len(cases)), key=lambda number: len(missing[number]))
        kept.add(best)
        new = set(missing[best])
        for pairs in missing:
            pairs -= new
    return kept


def _pairs(case: tuple[str, ...]) -> Iterable[Any]:
    """Pairs of (parameter, value); of one parameter alone its value."""
    return itertools.combinations(enumerate(case), min(2, len(case)))

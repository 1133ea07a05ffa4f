"""Tests that the documents show the results of learning with a delay on real data."""

import functools
import itertools
import math
import statistics

import pytest

from experiments import delay_robust
from experiments.convergence import _show, sharpness
from experiments.convergence._change import change

from .results import assert_shown, lines, result


def rows_of_convergence():
    return lines(_show.rows(result("convergence")))


def rows_of_ends():
    return lines(_show.ends(result("convergence")))


def words_on_convergence(factor=1.0):
    """Yields how often the default of K=2 and a plain delay end near D-Sync."""
    found = result("convergence")
    settings = list(_show.compared(found, factor))
    default, plain = (
        _show.count_near(found, name, settings)
        for name in ("K=2, predicted", "K=2, plain")
    )
    yield f"in {default} cases; a plain delay does so in {plain}"


words_on_large_rates = functools.partial(words_on_convergence, 2.0)


def words_on_what_is_given_back():
    """Yields the share of a plain delay's cost that the default recovers at K=2."""
    found, shares = result("convergence"), {"muon": [], "others": []}
    for setting in _show.compared(found, 1.0):
        plain, default = (
            change(found, setting, name) for name in ("K=2, plain", "K=2, predicted")
        )
        if plain.nats and not plain.is_near:
            share = 1 - statistics.mean(default.nats) / statistics.mean(plain.nats)
            kind = setting[1] if setting[1] == "muon" else "others"
            shares[kind].append(math.floor(100 * share))
    cifar, text = shares["muon"]
    least = min(shares["others"])
    yield f"recovers at least {least} % of the cost under momentum and AdamW"
    yield f"under Muon {cifar} % on CIFAR-10 and {text} % on the transformer"


def words_on_delay_robust():
    """Yields how often `delay_robust` ends above the default, at tuned rates."""
    found, above = result("convergence"), {2: [], 3: []}
    for setting, width in itertools.product(_show.compared(found, 1.0), above):
        robust, default = (
            statistics.mean(change(found, setting, f"K={width}, {name}").nats)
            for name in ("robust", "predicted")
        )
        above[width].append(robust > default)
    ends = "`delay_robust` ends above the default"
    yield f"{ends} in {sum(above[2])} of {len(above[2])} cases, mostly by little"
    yield f"At K=3 {ends} in {sum(above[3])} of {len(above[3])} cases"


def rows_of_counts():
    return lines(_show.counts(result("convergence")))


def rows_of_sharpness():
    found = result("convergence_sharpness")["runs"]
    return lines(sharpness.rows(found, result("convergence")))


def words_on_sharpness():
    """Yields the losses of the default below its limit, and beyond."""
    found, compared = result("convergence_sharpness")["runs"], result("convergence")
    below, beyond = [], []
    for setting, runs in sharpness.by_setting(found):
        for method in sharpness.SHOWN:
            share = sharpness.share(runs, method)
            group = below if share < 1 else beyond
            group.append((share, sharpness.cost(compared, setting, method)))
    most = math.ceil(1e3 * max(cost for _, cost in below)) / 1e3
    more = sum(cost > 0.01 for _, cost in beyond)
    some = [share for share, cost in below if cost > 0.01]
    assert min(some) > 0.9
    yield f"The table has {len(below) + len(beyond)} cases"
    yield f"None of the {len(below)} cases below the limit lost more than {most} nats."
    yield f"{len(some)} of the {len(below)} lost more than 0.01 nats, all above 0.9"
    yield f"{more} of the {len(beyond)} cases beyond the limit lost more than 0.01 nats"
    shares = [
        sharpness.share(runs, method)
        for _, runs in sharpness.by_setting(found)
        for method in ("K=2, plain", "K=3, plain")
    ]
    least = math.floor(10 * min(shares)) / 10
    yield f"every plain delay is beyond {least} times its limit"


def rows_of_delay_robust():
    return lines(delay_robust.rows(result("delay_robust")["test_loss"]))


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("README.md", words_on_convergence),
        ("docs/paper.md", words_on_convergence),
        ("docs/convergence.md", words_on_convergence),
        ("docs/convergence.md", words_on_large_rates),
        ("docs/convergence.md", words_on_what_is_given_back),
        ("docs/convergence.md", words_on_delay_robust),
        ("docs/convergence.md", rows_of_convergence),
        ("docs/convergence.md", rows_of_ends),
        ("docs/convergence.md", rows_of_counts),
        ("docs/convergence.md", rows_of_sharpness),
        ("docs/convergence.md", words_on_sharpness),
        ("docs/convergence.md", rows_of_delay_robust),
    ],
)
def test_figures_equal_the_result_files(path, rows):
    assert_shown(path, rows())

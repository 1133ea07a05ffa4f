"""Tests what the documents say about learning with a delay on real data."""

import itertools
import math
import statistics

import jax
import pytest

from experiments.convergence import _show, sharpness
from experiments.convergence._change import change
from experiments.report import result
from experiments.tables import TABLES
from pipejax import codecs

from .quoted import least_and_most, quoted_in

FOUND = result("convergence")
TUNED = list(_show.compared(FOUND, 1.0))


def near(settings):
    """Returns how often the default of K=2 and a plain delay end near D-Sync."""
    default, plain = (
        _show.count_near(FOUND, name, settings)
        for name in ("K=2, predicted", "K=2, plain")
    )
    return f"in {default} cases; a plain delay does so in {plain}"


@quoted_in("README.md", "docs/paper.md", "docs/convergence.md")
def test_counts_of_cases_near_d_sync():
    yield near(TUNED)


@quoted_in("docs/convergence.md")
def test_counts_of_cases_near_d_sync_at_large_rates():
    yield near(list(_show.compared(FOUND, 2.0)))


@quoted_in("docs/convergence.md")
def test_costs_of_many_replicas_are_quoted():
    titles, *rows = TABLES["replicas"]()
    places = {name: titles.index(name) for name in titles}

    def nats(row, title):
        return float(row[places[title]].split()[0])

    few = [nats(row, "K=2") for row in rows if int(row[places["replicas"]]) <= 16]
    yield f"up to 16 replicas, the default ends within {max(few):.4f} nats"
    many = {row[1]: row for row in rows if row[places["replicas"]] == "256"}
    assert many["momentum"][places["K=2"]] == "diverged"
    cost = nats(many["adamw"], "K=2")
    yield f"With 256 replicas, it costs {cost:.3f} nats under AdamW"
    most = max(abs(nats(row, "K=2, rank 16 at once")) for row in rows)
    yield f"With rank 16 at once, every cell is within {most:.4f} nats"
    sizes = (784, 256, 256, 10)
    shapes = (*itertools.pairwise(sizes), *((size,) for size in sizes[1:]))
    count = sum(map(math.prod, shapes))
    codec = codecs.power_sgd(16, jax.random.key(0)).of(shapes)
    share = round(100 * sum(codec.round_sizes(count)) / count)
    yield f"In this MLP of 784-256-256-10, rank 16 exchanges {share} % of the values"


@quoted_in("docs/convergence.md")
def test_times_of_parts_at_once_are_quoted():
    def step(cell, name):
        return cell["rows"][name]["step"]

    ratios = [
        step(cell, f"Pipe-SGD, rank {rank} at once") / step(cell, "Pipe-SGD")
        for cell in result("replicas_cluster")["cells"]
        for rank in (4, 16)
    ]
    yield f"a part at once takes {least_and_most(ratios)} times as long"


@quoted_in("docs/convergence.md")
def test_share_recovered_by_default_is_quoted():
    shares = {"muon": [], "others": []}
    for setting in TUNED:
        plain, default = (
            change(FOUND, setting, name) for name in ("K=2, plain", "K=2, predicted")
        )
        if plain.nats and not plain.is_near:
            share = 1 - statistics.mean(default.nats) / statistics.mean(plain.nats)
            kind = setting[1] if setting[1] == "muon" else "others"
            shares[kind].append(math.floor(100 * share))
    cifar, text = shares["muon"]
    least = min(shares["others"])
    yield f"recovers at least {least} % of the cost under momentum and AdamW"
    yield f"under Muon {cifar} % on CIFAR-10 and {text} % on the transformer"


@quoted_in("docs/convergence.md")
def test_delay_robust_ends_above_default_so_often():
    above = {2: [], 3: []}
    for setting, width in itertools.product(TUNED, above):
        robust, default = (
            statistics.mean(change(FOUND, setting, f"K={width}, {name}").nats)
            for name in ("robust", "predicted")
        )
        above[width].append(robust > default)
    ends = "`delay_robust` ends above the default"
    yield f"{ends} in {sum(above[2])} of {len(above[2])} cases, mostly by little"
    yield f"At K=3 {ends} in {sum(above[3])} of {len(above[3])} cases"


@quoted_in("docs/convergence.md")
def test_losses_below_and_beyond_the_limit():
    cells = list(sharpness.by_setting(result("convergence_sharpness")["runs"]))
    pairs = [
        (sharpness.share(runs, method), sharpness.cost(FOUND, setting, method))
        for setting, runs in cells
        for method in sharpness.SHOWN
    ]
    below = [pair for pair in pairs if pair[0] < 1]
    beyond = [cost for share, cost in pairs if share >= 1]
    most = math.ceil(1e3 * max(cost for _, cost in below)) / 1e3
    some = [share for share, cost in below if cost > 0.01]
    assert min(some) > 0.9
    yield f"The table has {len(pairs)} cases"
    yield f"None of the {len(below)} cases below the limit lost more than {most} nats."
    yield f"{len(some)} of the {len(below)} lost more than 0.01 nats, all above 0.9"
    more = sum(cost > 0.01 for cost in beyond)
    yield f"{more} of the {len(beyond)} cases beyond the limit lost more than 0.01 nats"
    least = min(
        sharpness.share(runs, f"K={width}, plain")
        for _, runs in cells
        for width in (2, 3)
    )
    yield f"every plain delay is beyond {math.floor(10 * least) / 10} times its limit"


@pytest.mark.parametrize(("name", "bound"), [("smooth", 0.03), ("softmax", 0.02)])
def test_convex_delays_are_gone_in_the_end(name, bound):
    """The document says 3 % for smooth losses, and 2 % for softmax regression."""
    found = result("convex")[name]
    for rows in [found] if name == "smooth" else found.values():
        assert all(abs(row[-1] / rows["1"][-1] - 1) < bound for row in rows.values())

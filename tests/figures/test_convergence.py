"""Tests what the documents say about learning with a delay."""

import itertools
import math

import jax
import pytest

from experiments.convergence import _show, sharpness
from experiments.replicas._table import above, paired
from experiments.report import result
from experiments.tables import TABLES
from pipejax import codecs

from .quoted import quoted_in

FOUND = result("convergence")


def matching(method):
    """Returns how often a method of K=2 matches synchronous training."""
    return _show.count_near(FOUND, method, list(_show.compared(FOUND, 1.0)))


@quoted_in("README.md")
def test_matching_cases_of_the_default_are_counted():
    yield matching("K=2, predicted")


@quoted_in("docs/convergence.md", "docs/benchmarks/accuracy.md")
def test_matching_cases_with_and_without_prediction():
    default, plain = map(matching, ("K=2, predicted", "K=2, plain"))
    yield f"in {default} cases; a plain delay does so in {plain}"


@quoted_in("docs/convergence.md")
def test_costs_of_many_replicas_are_quoted():
    titles, *rows = TABLES["replicas"]()
    places = {name: titles.index(name) for name in titles}

    def nats(row, title):
        return float(row[places[title]].split()[0])

    mnist = [row for row in rows if row[0] == "mnist"]
    few = [nats(row, "K=2") for row in mnist if int(row[places["replicas"]]) <= 16]
    yield f"the default ends within {max(few):.4f} nats of synchronous training with up"
    many = {row[1]: row for row in rows if row[places["replicas"]] == "256"}
    assert many["momentum"][places["K=2"]] == "diverged"
    cost = nats(many["adamw"], "K=2")
    yield f"With 256, it costs {cost:.3f} nats under AdamW"
    on_text = {
        name: [nats(row, "K=2") for row in rows if row[:2] == ["shakespeare", name]]
        for name in ("adamw", "momentum", "muon")
    }
    four, most = on_text["adamw"]
    yield f"it costs {four:.3f} nats with 4 replicas and {most:.3f} with 64"
    yield "Under Muon, it costs {:.3f} and {:.3f}".format(*on_text["muon"])
    yield "and under momentum {:.2f} and {:.2f}".format(*on_text["momentum"])
    most = max(abs(nats(row, "K=2, rank 16 at once")) for row in rows)
    yield f"With rank 16 at once, every cell is within {most:.4f} nats"


@quoted_in("docs/convergence.md", "docs/benchmarks/accuracy.md")
def test_costs_after_a_warm_up_are_quoted():
    found = result("replicas_shakespeare")
    pairs = [paired("adamw", "K=2, warm-up", count, found) for count in (4, 64)]
    assert [len(each) for each in pairs] == [3, 3]  # seeds
    cells = [above("adamw", "K=2, warm-up", count, found) for count in (4, 64)]
    four, most = (float(cell.split()[0]) for cell in cells)
    yield f"{four:.3f} and {most:.3f}"


@quoted_in("README.md")
def test_costs_on_text_are_quoted():
    titles, *rows = TABLES["replicas"]()
    row = next(row for row in rows if row[:3] == ["shakespeare", "adamw", "4"])
    default, at_once = (
        float(row[titles.index(title)].split()[0])
        for title in ("K=2", "K=2, rank 16 at once")
    )
    yield f"default costs {default:.2f} nats, and {at_once:.2f} with a part exchanged"


@quoted_in("docs/benchmarks/accuracy.md")
def test_costs_of_single_seeds_on_text_are_quoted():
    record = result("replicas_shakespeare")

    def costs(method, replicas):
        pairs = paired("adamw", method, replicas, record)
        return [later["test_loss"] - first["test_loss"] for first, later in pairs]

    four, many = costs("K=2", 4), costs("K=2", 64)
    assert [round(max(each) / min(each)) for each in (four, many)] == [4, 4]
    own = [costs("K=2, own", replicas)[0] for replicas in (4, 64)]
    yield f"own gradients loses {own[0]:.3f} nats with 4 replicas and {own[1]:.2f} with"
    yield f"where the default loses {four[0]:.3f} and {many[0]:.3f}"


@quoted_in("docs/benchmarks/accuracy.md")
def test_costs_at_once_on_text_are_quoted():
    record = result("replicas_shakespeare")
    pairs = paired("momentum", "K=2, rank 16 at once", 4, record)
    assert len(pairs) == 3
    ends = [first["test_loss"] for first, _ in pairs]
    yield f"synchronous runs differ by {max(ends) - min(ends):.2f} nats between seeds"
    assert float(above("momentum", "K=2, rank 16 at once", 4, record).split()[0]) < 0
    costs = [
        later["test_loss"] - first["test_loss"]
        for replicas in (4, 64)
        for first, later in paired("momentum", "K=2", replicas, record)
    ]
    assert len(costs) == 6
    yield f"the default loses between {min(costs):.2f} and {max(costs):.2f} nats"
    yield "where rank 16 at once loses none"
    adamw, momentum, muon = (
        float(above(name, "K=2, rank 4 at once", 4, record).split()[0])
        for name in ("adamw", "momentum", "muon")
    )
    yield f"In one seed, rank 4 at once loses {adamw:.3f} under AdamW"
    yield f"{momentum:.3f} under momentum and {muon:.3f} under Muon"


@quoted_in("docs/benchmarks/accuracy.md")
def test_share_of_values_at_once_is_quoted():
    sizes = (784, 256, 256, 10)
    shapes = (*itertools.pairwise(sizes), *((size,) for size in sizes[1:]))
    count = sum(map(math.prod, shapes))
    codec = codecs.power_sgd(16, jax.random.key(0)).of(shapes)
    share = round(100 * sum(codec.round_sizes(count)) / count)
    yield f"In this MLP of 784-256-256-10, rank 16 exchanges {share} % of the values"


def sharpness_and_cost():
    """Yields the share of the limit and the cost in nats of each case."""
    for setting, runs in sharpness.by_setting(result("convergence_sharpness")["runs"]):
        for method in sharpness.SHOWN:
            cost = sharpness.cost(FOUND, setting, method)
            yield sharpness.share(runs, method), cost


@quoted_in("docs/convergence.md", "docs/benchmarks/accuracy.md")
def test_losses_below_and_beyond_the_limit_are_quoted():
    below = [cost for share, cost in sharpness_and_cost() if share < 1]
    beyond = [cost for share, cost in sharpness_and_cost() if share >= 1]
    most = math.ceil(1e3 * max(below)) / 1e3
    yield f"below the limit lost more than {most} nats"
    more = sum(cost > 0.01 for cost in beyond)
    yield f"{more} of {len(beyond)} cases beyond the limit lost more than 0.01 nats"
    assert min(x for x, cost in sharpness_and_cost() if cost > 0.01) > 0.9


@pytest.mark.parametrize(("name", "bound"), [("smooth", 0.03), ("softmax", 0.02)])
def test_convex_delays_are_gone_in_the_end(name, bound):
    """docs/theory.md says 3 % for smooth losses, and 2 % for softmax regression."""
    found = result("convex")[name]
    for rows in [found] if name == "smooth" else found.values():
        assert all(abs(row[-1] / rows["1"][-1] - 1) < bound for row in rows.values())

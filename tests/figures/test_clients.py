"""Tests the results on other programs and optimizers, and what the document says."""

import math
import statistics

from experiments.clients import __main__ as clients
from experiments.clients._compare import within
from experiments.report import result

from .quoted import quoted_in

RECORD = result("clients")
TRAINED = {
    (name, way): row
    for kind in ("programs", "optimizers")
    for name, found in RECORD[kind].items()
    for way, row in found.items()
    if "refused" not in row
}


def test_every_difference_is_within_its_bound():
    assert [where for where, row in TRAINED.items() if not within(row)] == []


def test_bounds_tell_the_columns_apart():
    for where, row in TRAINED.items():
        assert row["params"]["bound"] < row["apart"], where


@quoted_in("docs/benchmarks/optimizers.md")
def test_words_quote_the_table():
    rows = TRAINED.values()
    parts = [part for row in rows for part in row.values() if isinstance(part, dict)]
    shares = [x["difference"] / x["bound"] for x in parts if x["difference"]]
    apart = [row["apart"] / row["params"]["bound"] for row in rows]
    assert statistics.median(apart) > 1000
    programs = len(RECORD["programs"])
    optimizers = len({name for name, _ in TRAINED} - {*RECORD["programs"]})
    yield f"In {len(rows)} runs of {programs} programs and {optimizers} optimizers"
    yield f"the largest difference is {math.ceil(100 * max(shares)) / 100:.2f} of its"
    yield f"at least {math.floor(min(apart))} times as far from one another"


def test_everything_was_tried():
    assert set(RECORD["programs"]) == set(clients.PROGRAMS)
    assert set(RECORD["optimizers"]) == set(clients.OPTIMIZERS)
    assert len(RECORD["optimizers"]) >= 40

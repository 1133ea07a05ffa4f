"""Tests that the document on other programs and optimizers shows the results."""

import math
import statistics

from experiments.clients import __main__ as clients
from experiments.clients._compare import within

from .results import ROOT, result

RECORD = result("clients")


def test_tables_equal_the_result_file():
    text = (ROOT / "docs/clients.md").read_text()
    assert clients.with_tables(text, *clients.tables(RECORD)) == text


def trained():
    """Yields the rows of all runs that were not refused, by name and way."""
    for kind in ("programs", "optimizers"):
        for name, found in RECORD[kind].items():
            for way, row in found.items():
                if "refused" not in row:
                    yield (name, way), row


def test_every_difference_is_within_its_bound():
    assert [where for where, row in trained() if not within(row)] == []


def test_bounds_tell_the_columns_apart():
    weak = [w for w, row in trained() if row["params"]["bound"] >= row["apart"]]
    assert weak == []


def words():
    rows = [row for _, row in trained()]
    parts = [part for row in rows for part in row.values() if isinstance(part, dict)]
    shares = [x["difference"] / x["bound"] for x in parts if x["difference"]]
    apart = [row["apart"] / row["params"]["bound"] for row in rows]
    names = {name for (name, _), _ in trained()}
    optimizers = len(names - {*RECORD["programs"]})
    programs = len(RECORD["programs"])
    yield f"In {len(rows)} runs of {programs} programs and {optimizers} optimizers"
    yield f"no difference is above {math.ceil(100 * max(shares)) / 100:.2f} of its"
    yield f"at least {math.floor(min(apart))} times as far from one another"
    assert statistics.median(apart) > 1000


def test_words_equal_the_result_file():
    text = " ".join((ROOT / "docs/clients.md").read_text().split())
    for each in words():
        assert each in text


def test_every_client_was_tried():
    assert set(RECORD["programs"]) == set(clients.PROGRAMS)
    assert set(RECORD["optimizers"]) == set(clients.OPTIMIZERS)
    assert len(RECORD["optimizers"]) >= 40

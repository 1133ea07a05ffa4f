"""Reads result files, and checks that documents show their figures."""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def result(name):
    return json.loads((ROOT / f"experiments/results/{name}.json").read_text())


def lines(rows):
    """Returns the lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in rows]


def assert_shown(path, rows):
    """Asserts that the document contains every row, wherever its lines are broken."""
    text = " ".join((ROOT / path).read_text().split())
    for row in rows:
        assert " ".join(row.split()) in text

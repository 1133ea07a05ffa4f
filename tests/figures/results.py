"""Reads result files, and checks that documents show their figures."""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def result(name):
    return json.loads((ROOT / f"experiments/results/{name}.json").read_text())


def lines(rows):
    """Returns the lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in rows]


def judged(variants, name):
    """Returns the ratios of a step to its twin by hand, or those of its program.

    Programs are compared if a step takes at most 10 ms.
    """
    short = variants[name]["ms_per_step"] <= 10
    row = variants[f"{name}, program" if short else name]
    assert variants[name]["judged"] == row["ratio"]["median"]
    return row


def with_quartiles(row):
    low, middle, high = row["ratio"].values()
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def assert_shown(path, rows):
    """Asserts that the document contains every row, wherever its lines are broken."""
    text = " ".join((ROOT / path).read_text().split())
    for row in rows:
        assert " ".join(row.split()) in text

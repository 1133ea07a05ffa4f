"""Checks that documents contain figures in sentences, as the result files give them."""

import pathlib

import pytest

from experiments.tables import TABLES

ROOT = pathlib.Path(__file__).parents[2]


def quoted_in(*paths):
    """Turns a function that yields passages into a test that documents contain them.

    The documents may break their lines elsewhere.
    """

    def decorate(passages):
        @pytest.mark.parametrize("path", paths)
        def test(path):
            text = " ".join((ROOT / path).read_text().split())
            missing = [x for x in passages() if " ".join(x.split()) not in text]
            assert not missing, f"{path} must say: {missing}"

        return test

    return decorate


def column(table, title, start=""):
    """Returns the first number of each cell below a title, by rows that begin so."""
    titles, *rows = TABLES[table]()
    rows = [row for row in rows if ", ".join(row).startswith(start)]
    return [float(row[titles.index(title)].split()[0]) for row in rows]


def least_and_most(values):
    return f"{min(values):.2f} to {max(values):.2f}"

"""Checks that documents contain figures in sentences, as the result files give them."""

import pathlib

import pytest

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
            assert missing == [], f"{path} must say this"

        return test

    return decorate


def least_and_most(values):
    values = list(values)
    return f"{min(values):.2f} to {max(values):.2f}"

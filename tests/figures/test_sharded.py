"""Tests that the document on sharded models shows the results of its experiments."""

import pytest

from experiments.sharded import compiled, nanogpt

from .results import assert_shown, lines, result


def rows_of_compiled():
    return lines(compiled.rows(result("sharded")["cells"]))


def rows_of_nanogpt():
    return lines(nanogpt.rows(result("nanogpt")["cells"]))


def words_on_memory():
    """Yields by how many shards a delay exceeds a synchronous step, on GPUs."""
    cells = [
        cell
        for cell in result("sharded")["cells"]
        if cell["target"].startswith("h100") and cell["step"].startswith("K=2")
    ]
    plain = [x["more_memory"] for x in cells if "int8" not in x["step"]]
    eight = [x["more_memory"] for x in cells if "int8" in x["step"]]
    yield f"{min(plain):.1f} to {max(plain):.1f} shards more than D-Sync"
    yield f"{min(eight):.1f} to {max(eight):.1f} with eight bits"


@pytest.mark.parametrize("rows", [rows_of_compiled, rows_of_nanogpt, words_on_memory])
def test_figures_are_those_of_the_result_files(rows):
    assert_shown("docs/sharded.md", rows())

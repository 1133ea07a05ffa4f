"""Tests that the document on sharded optimizers shows its experiments' results."""

import pytest

from experiments import memory
from experiments.sharded_optimizer import accuracy

from .results import assert_shown, lines, result


def rows_of_memory():
    return lines(memory.rows(result("memory")["cells"]))


def rows_of_accuracy():
    runs = result("sharded_optimizer_accuracy")["runs"]
    return lines(accuracy.rows(result("convergence"), runs))


@pytest.mark.parametrize("rows", [rows_of_memory, rows_of_accuracy])
def test_figures_are_those_of_the_result_files(rows):
    assert_shown("docs/sharded_optimizer.md", rows())

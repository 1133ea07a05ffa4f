"""Tests that the document on sharded optimizers shows its experiments' results."""

import statistics

import pytest

from experiments import memory
from experiments.sharded_optimizer import accuracy, cluster

from .results import assert_shown, lines, result


def rows_of_memory():
    return lines(memory.rows(result("memory")["cells"]))


def rows_of_accuracy():
    runs = result("sharded_optimizer_accuracy")["runs"]
    return lines(accuracy.rows(result("convergence"), runs))


def rows_of_cluster():
    return lines(cluster.rows(result("sharded_optimizer_cluster")["cells"]))


def words_on_the_update():
    for cell in result("sharded_optimizer_cluster")["cells"]:
        whole, quarter = (
            statistics.median(cell["updates"][x]) for x in ("whole", "quarter")
        )
        yield f"{quarter / whole:.2f} of the time for {cell['problem']['model']}"


@pytest.mark.parametrize(
    "rows", [rows_of_memory, rows_of_accuracy, rows_of_cluster, words_on_the_update]
)
def test_figures_are_those_of_the_result_files(rows):
    assert_shown("docs/sharded_optimizer.md", rows())

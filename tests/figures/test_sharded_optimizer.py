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


def words_on_memory():
    """Checks what the document says of all models, and of prediction in all but one."""
    cells = {(x["model"], x["step"]): x for x in result("memory")["cells"]}
    plain, predicted = "K=2, sharded, plain", "K=2, sharded, predicted"
    assert all(x["covered"] > 0.995 for (_, s), x in cells.items() if "K=2, sha" in s)
    assert all(x["met"] for (_, s), x in cells.items() if s == plain)
    missed = [m for (m, s), x in cells.items() if s == predicted and not x["met"]]
    assert missed == ["mlp"]
    yield "With prediction, it does so in all but one: the MLP"


def words_on_accuracy():
    rows = rows_of_accuracy()[1:]
    last = (float(row.split("|")[-2].split()[0]) for row in rows)
    assert all(abs(nats) < 0.001 for nats in last)
    yield "prediction ends within 0.001 nats of synchronous training"


@pytest.mark.parametrize(
    "rows", [rows_of_memory, rows_of_accuracy, words_on_memory, words_on_accuracy]
)
def test_figures_are_those_of_the_result_files(rows):
    assert_shown("docs/sharded_optimizer.md", rows())

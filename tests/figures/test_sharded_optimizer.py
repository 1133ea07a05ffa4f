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


def cells_of_cluster():
    return result("sharded_optimizer_cluster")["cells"]


def rows_of_cluster():
    return lines(cluster.rows(cells_of_cluster()))


def words_on_cluster():
    ours, theirs = "Pipe-SGD, ZeRO-1", "DDP, ZeRO-1"
    mlp, resnet = cells_of_cluster()
    ratios = [statistics.median(x["measured"][ours]["ratio"]) for x in (mlp, resnet)]
    yield f"takes {ratios[0]:.2f} (wide MLP) and {ratios[1]:.2f} (ResNet-18) times"
    faster = [
        x["rows"][theirs]["step"] / x["rows"][ours]["step"] for x in (mlp, resnet)
    ]
    yield f"It is {faster[0]:.2f} and {faster[1]:.2f} times as fast as PyTorch's DDP"
    shares = [
        statistics.median(x["updates"]["quarter"])
        / statistics.median(x["updates"]["whole"])
        for x in (mlp, resnet)
    ]
    yield f"takes {shares[0]:.2f} and {shares[1]:.2f} of the time of the whole update"


def words_on_memory():
    """Checks what the document says of all models, and of prediction in all but one."""
    cells = {(x["model"], x["step"]): x for x in result("memory")["cells"]}
    plain, predicted = "K=2, sharded, plain", "K=2, sharded, predicted"
    assert all(x["covered"] > 0.995 for (_, s), x in cells.items() if "K=2, sha" in s)
    assert all(x["met"] for (_, s), x in cells.items() if s == plain)
    missed = [m for (m, s), x in cells.items() if s == predicted and not x["met"]]
    assert missed == ["mlp"]
    yield "With prediction, only the MLP takes more"


def words_on_accuracy():
    cells = [[x.strip() for x in row.split("|")] for row in rows_of_accuracy()[1:]]
    plain, unsharded, sharded = (
        {tuple(row[1:3]): _nats(row[column]) for row in cells} for column in (4, 5, 6)
    )
    most = max(abs(sharded[x] - unsharded[x]) for x in sharded)
    yield f"ends within {most:.4f} nats of the unsharded pipeline"
    images = max(abs(sharded[x]) for x in sharded if x[0] != "shakespeare")
    yield f"prediction ends within {images:.3f} nats of synchronous training on\nimages"
    adamw, momentum = ("shakespeare", "adamw"), ("shakespeare", "momentum")
    yield f"{sharded[adamw]:.3f} nats behind under AdamW and {sharded[momentum]:.3f}"
    yield f"a plain delay ends {plain[adamw]:.2f} and {plain[momentum]:.2f}"


def _nats(change):
    return float("nan") if change == "diverged" else float(change.split()[0])


@pytest.mark.parametrize(
    "rows",
    [
        *(rows_of_memory, words_on_memory),
        *(rows_of_accuracy, words_on_accuracy),
        *(rows_of_cluster, words_on_cluster),
    ],
)
def test_figures_equal_the_result_files(rows):
    assert_shown("docs/sharded_optimizer.md", rows())

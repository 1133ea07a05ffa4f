"""Tests the results on sharded optimizers, and what the document says about them."""

import statistics

from experiments.report import result
from experiments.tables import TABLES

from .quoted import quoted_in

quoted = quoted_in("docs/sharded_optimizer.md")


@quoted
def test_steps():
    ours, theirs = "Pipe-SGD, ZeRO-1", "DDP, ZeRO-1"

    def both(figure):
        return " (wide MLP) and ".join(
            f"{figure(x):.2f}" for x in result("sharded_optimizer_cluster")["cells"]
        )

    def updates(cell, kind):
        return statistics.median(cell["updates"][kind])

    ratios = both(lambda x: statistics.median(x["measured"][ours]["ratio"]))
    yield f"takes {ratios} (ResNet-18) times"
    faster = both(lambda x: x["rows"][theirs]["step"] / x["rows"][ours]["step"])
    shares = both(lambda x: updates(x, "quarter") / updates(x, "whole"))
    faster, shares = (x.replace(" (wide MLP)", "") for x in (faster, shares))
    yield f"It is {faster} times as fast as PyTorch's DDP"
    yield f"takes {shares} of the time of the whole update"


@quoted
def test_memory():
    """Checks what holds for all models, and with prediction for all but one."""
    cells = {(x["model"], x["step"]): x for x in result("memory")["cells"]}
    plain, predicted = "K=2, sharded, plain", "K=2, sharded, predicted"
    assert all(x["covered"] > 0.995 for (_, s), x in cells.items() if "K=2, sha" in s)
    assert all(x["met"] for (_, s), x in cells.items() if s == plain)
    missed = [m for (m, s), x in cells.items() if s == predicted and not x["met"]]
    assert missed == ["mlp"]
    yield "With prediction, only the MLP takes more"


@quoted
def test_accuracy():
    _, *rows = TABLES["sharded_optimizer.accuracy"]()
    plain, unsharded, sharded = (
        {tuple(row[:2]): nats(row[column]) for row in rows} for column in (3, 4, 5)
    )
    most = max(abs(sharded[x] - unsharded[x]) for x in sharded)
    yield f"ends within {most:.4f} nats of the unsharded pipeline"
    images = max(abs(sharded[x]) for x in sharded if x[0] != "shakespeare")
    yield f"prediction ends within {images:.3f} nats of synchronous training on images"
    adamw, momentum = ("shakespeare", "adamw"), ("shakespeare", "momentum")
    yield f"{sharded[adamw]:.3f} nats behind under AdamW and {sharded[momentum]:.3f}"
    yield f"a plain delay ends {plain[adamw]:.2f} and {plain[momentum]:.2f}"


def nats(change):
    return float("nan") if change == "diverged" else float(change.split()[0])

"""Tests the results on sharded optimizers, and what the document says about them."""

import statistics

import jax.numpy as jnp
import optax

import pipejax as pj
from experiments.report import result
from experiments.tables import TABLES
from pipejax import codecs

from .quoted import column, quoted_in

quoted = quoted_in("docs/sharded_optimizer.md")


@quoted
def test_step_times_are_quoted():
    cells = result("sharded_optimizer_cluster")["cells"]
    title = "over the longer of compute and exchange"
    ratios = [
        column("sharded_optimizer.cluster", title, f"{name}, 500mbit, Pipe-SGD, Z")[0]
        for name in ("wide_mlp, 512", "resnet18, 4")
    ]
    yield f"takes {ratios[0]:.2f} (wide MLP) and {ratios[1]:.2f} (ResNet-18) times"
    ours, theirs = (
        [cell["rows"][f"{name}, ZeRO-1"]["step"] for cell in cells]
        for name in ("Pipe-SGD", "DDP")
    )
    faster = (f"{x / y:.2f}" for x, y in zip(theirs, ours, strict=True))
    yield f"It is {' and '.join(faster)} times as fast as PyTorch's DDP"
    quarter, whole = (
        [statistics.median(cell["updates"][name]) for cell in cells]
        for name in ("quarter", "whole")
    )
    shares = (f"{x / y:.2f}" for x, y in zip(quarter, whole, strict=True))
    yield f"takes {' and '.join(shares)} of the time of the whole update"


@quoted
def test_memory_figures_are_quoted():
    """Checks what holds for all models, and with prediction for all but one."""
    cells = {(x["model"], x["step"]): x for x in result("memory")["cells"]}
    plain, predicted = "K=2, sharded, plain", "K=2, sharded, predicted"
    assert all(x["covered"] > 0.995 for (_, s), x in cells.items() if "K=2, sha" in s)
    assert all(x["met"] for (_, s), x in cells.items() if s == plain)
    missed = [m for (m, s), x in cells.items() if s == predicted and not x["met"]]
    assert missed == ["mlp"]
    yield "With prediction, only the MLP takes more"


@quoted
def test_accuracy_figures_are_quoted():
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


@quoted
def test_bits_of_coded_all_gather_are_quoted():
    def bits(codec, predicts):
        train = pj.make_train_step(
            lambda w, batch: jnp.mean(batch @ w),
            optax.adamw(1e-2),
            mesh=pj.data_mesh(4),
            weight_prediction=predicts,
            shard_optimizer=True,
            gather_codec=codec,
        )
        state = train.init(jnp.zeros((512, 512)))
        found = train.transfers(state, jnp.zeros((4, 512)))
        sent = sum(x.wire_bytes for x in found if x.kind == "all-gather")
        return 8 * sent / (3 / 4 * 512 * 512)  # a device sends its piece to 3 others

    int4 = codecs.int4()
    coded, exact = bits(int4, True), bits(None, True)
    yield f"{coded:.3g} bits a parameter with `int4()`, in place of {exact:.0f}"
    coded, exact = bits(int4, False), bits(None, False)
    yield f"it is {coded:.2g} bits in place of {exact:.0f}"

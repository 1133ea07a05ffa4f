"""Tests the results on sharded optimizers, and what the document says about them."""

import statistics

import jax.numpy as jnp
import optax

import pipejax as pj
from experiments.report import result
from experiments.tables import TABLES
from pipejax import codecs

from .quoted import quoted_in


@quoted_in("docs/benchmarks/speed.md")
def test_times_of_updates_are_quoted():
    cells = result("sharded_optimizer_cluster")["cells"]
    quarter, whole = (
        [statistics.median(cell["updates"][name]) for cell in cells]
        for name in ("quarter", "whole")
    )
    mlp, resnet = (f"{x / y:.2f}" for x, y in zip(quarter, whole, strict=True))
    yield f"takes {mlp} (wide MLP) and {resnet} (ResNet-18) of the time of the whole"
    for cell in cells:
        ours, theirs = (f"{x}, ZeRO-1" for x in ("Pipe-SGD", "DDP"))
        assert 1.7 < cell["rows"][theirs]["step"] / cell["rows"][ours]["step"] < 2


@quoted_in("docs/benchmarks/memory.md")
def test_memory_figures_are_quoted():
    """Checks what holds for all models but the smallest."""
    cells = [x for x in result("memory")["cells"] if "K=2, sharded" in x["step"]]
    shares = [x["covered"] for x in cells if x["model"] != "mlp"]
    yield f"{min(shares):.2f} to {max(shares):.2f} of its FLOPs under its exchange"
    (least,) = {f"{x['covered']:.2f}" for x in cells if x["model"] == "mlp"}
    yield f"and {least} in the MLP"
    more = [(x["model"], x["step"]) for x in cells if x["over_by_hand"] > 1]
    assert more == [("mlp", "K=2, sharded, predicted")]
    yield "With prediction, only the MLP takes more"


def test_sharded_pipeline_ends_where_documents_say():
    """It is near synchronous training on images, and near the unsharded one on text."""
    _, *rows = TABLES["sharded_optimizer.accuracy"]()
    unsharded, sharded = (
        {tuple(row[:2]): float(row[column].split()[0]) for row in rows}
        for column in (4, 5)
    )
    assert all(abs(sharded[x]) < 0.01 for x in sharded if x[0] != "shakespeare")
    assert all(abs(sharded[x] - unsharded[x]) < 0.02 for x in sharded)


@quoted_in("docs/sharded_optimizer.md")
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

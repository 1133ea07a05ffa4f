"""Tests the results on sharded models, and what the documents say about them."""

import pytest

from experiments.report import result

from .quoted import quoted_in

SHARDED = "K=2, ZeRO-1"
CELLS = result("sharded_compiled")["cells"]


@quoted_in("README.md")
def test_hidden_shares_of_sharded_models_are_quoted():
    shares = {}
    for cell in CELLS:
        if cell["target"].startswith("h100"):
            shares.setdefault(cell["step"], set()).add(f"{cell['covered_between']:.2f}")
    (none,), (all_of_it,) = shares["D-Sync"], shares["K=2"]
    yield f"compute nothing beside the exchange between hosts ({none} of their FLOPs)"
    yield f"and pipelined ones everything ({all_of_it}: ["


def test_exchange_is_hidden_and_groups_send_as_twin():
    """XLA merges small gathers of one program, so that its groups send otherwise."""
    for cell in CELLS:
        step, covered = cell["step"], cell["covered_between"]
        if step == "D-Sync":
            assert covered < 0.015
        elif step != SHARDED:
            assert covered > 0.995
            exception = (cell["size"], cell["target"]) == ("7B", "tpu:2xv5e:4x4")
            assert cell["checks"]["inside"] or exception


def test_memory_bytes_and_hidden_shares_of_a_sharded_optimizer():
    twins = {(x["size"], x["target"]): x for x in CELLS if x["step"] == "D-Sync"}
    found = [x for x in CELLS if x["step"] == SHARDED]
    for cell in found:
        twin = twins[cell["size"], cell["target"]]
        assert twin["covered_inside"] <= cell["covered_inside"] + 0.001
        assert cell["sent_between"] / twin["sent_between"] == pytest.approx(7 / 8, 1e-3)
        for line in cell["inside"]:
            before, after = line.split(" times, ")[1].split(" and ")
            assert before == after or "over host+fsdp" in line
    (large,) = (x for x in found if x["more_memory"] > 0)
    assert (large["size"], large["groups"]) == ("7B", 4)

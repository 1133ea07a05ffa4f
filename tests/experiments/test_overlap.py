"""Tests that a step with default settings hides its all-reduce on absent GPUs."""

import json

import jax
import pytest

pytest.importorskip("jax_plugins.xla_cuda12")
pytest.importorskip("nvidia.cuda_nvcc")

from experiments import overlap, report

PROGRAMS = overlap.SMALL["programs"]


# There are as many cases as targets and models in the small matrix.
@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "model", "least"),
    [
        ("h100:1x1x8", "mlp", 0.90),
        ("h100:1x1x8", "cnn", 0.95),
        ("h100:1x1x8", "transformer scan", 0.95),
        ("h100:1x8x8", "mlp", 0.90),
        ("h100:1x8x8", "cnn", 0.95),
        ("h100:1x8x8", "transformer scan", 0.95),
    ],
)
def test_pipelined_all_reduce_is_hidden_and_others_are_not(
    tmp_path, target, model, least
):
    out = tmp_path / "overlap.json"
    assert overlap.main(overlap.Config((target,), (model,), PROGRAMS, out=out)) == 0
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == len(PROGRAMS)
    found = {cell["program"]: cell for cell in cells}
    pipelined = found["pipelined"]
    # XLA combines short arrays only, and each long one has an all-reduce of its own.
    count = 5 if model == "transformer scan" else 1
    assert pipelined["kinds"] == ["all-reduce"] * count
    assert pipelined["asynchronous"] == [True] * count
    assert pipelined["covered"] >= least
    # Of the transformer's, one long array's starts before a last, short matmul.
    assert found["D-Sync"]["covered"] <= (0 if count == 1 else 0.002)
    # A stale sum alone does not hide the all-reduce: the negative control is stale too.
    assert found["negative control"]["covered"] < 0.5
    two_shot = found["two-shot"]
    assert two_shot["kinds"] == ["all-to-all", "all-gather"]
    assert two_shot["asynchronous"] == [True, True]
    assert two_shot["covered"] >= 0.85


@pytest.mark.full
def test_all_reduce_stays_hidden_with_every_option():
    """The program has batch norm, AdamW, clipping, microbatches, a key and metrics."""
    cell = overlap.measured("h100:1x8x8", "resnet18", "everything")
    assert all(cell["asynchronous"])
    assert cell["covered"] >= 0.95


@pytest.mark.parametrize(
    ("flags", "count"),
    # TPUs have two programs of six models. "everything" is for one model only, and the
    # last three programs are for 64 H100 only.
    [
        ({"small": True}, 2 * 3 * 4),
        ({}, 12 * (6 * 7 + 1) + 6 * 3),
        ({"tpu": True}, 4 * 6 * 2),
    ],
)
def test_matrix_has_each_cell_once(monkeypatch, tmp_path, flags, count):
    def measured(target, model, program):
        cell = {"target": target, "model": model, "program": program}
        return cell | {"failed": "not compiled", "met": True}

    monkeypatch.setattr(overlap, "measured", measured)
    out = tmp_path / "overlap.json"
    assert overlap.main(overlap.Config(**flags, out=out)) == 0
    cells = json.loads(out.read_text())["cells"]
    names = {(cell["target"], cell["model"], cell["program"]) for cell in cells}
    assert len(cells) == len(names) == count


def test_partial_run_keeps_the_other_cells(tmp_path, monkeypatch):
    """Each cell has its own commit; their order is that of the tables."""

    def measured(target, model, program):
        cell = {"target": target, "model": model, "program": program}
        return cell | {"failed": "not compiled", "met": True}

    monkeypatch.setattr(overlap, "measured", measured)
    out = tmp_path / "overlap.json"
    runs = (("h200:1x1x8", "first"), ("a100:1x1x8", "second"), ("h200:1x1x8", "third"))
    for target, commit in runs:
        monkeypatch.setattr(report, "commit", lambda commit=commit: commit)
        overlap.main(overlap.Config((target,), ("mlp",), ("D-Sync",), out=out))
    found = json.loads(out.read_text())["cells"]
    assert [(cell["target"], cell["commit"]) for cell in found] == [
        ("a100:1x1x8", "second"),
        ("h200:1x1x8", "third"),
    ]


CELL = (("h100:1x1x8",), ("mlp",), ("pipelined",))


@pytest.mark.full
def test_missed_bar_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overlap, "judged", lambda *_: ("more than all", False))
    assert overlap.main(overlap.Config(*CELL, out=tmp_path / "out.json")) == 1
    line = "h100:1x1x8, mlp, pipelined: 1.00, 1/1; MISSED, the bar is more than all"
    assert line in capsys.readouterr().err


def test_failed_compilation_is_recorded(tmp_path, monkeypatch, capsys):
    def compiled(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no\nbecause")

    monkeypatch.setattr(overlap, "compiled", compiled)
    assert overlap.main(overlap.Config(*CELL, out=tmp_path / "out.json")) == 1
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert (cell["failed"], cell["met"]) == ("INTERNAL: no", False)
    assert "does not compile: INTERNAL: no\n" in capsys.readouterr().err

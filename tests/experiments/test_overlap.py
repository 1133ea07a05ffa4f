"""The step as it comes hides its all-reduce, on GPUs that are not there."""

import json

import jax
import pytest

pytest.importorskip("jax_plugins.xla_cuda12")
pytest.importorskip("nvidia.cuda_nvcc")

from experiments import overlap


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The small matrix: 8 and 64 H100, three models, four programs."""
    out = tmp_path_factory.mktemp("overlap") / "overlap.json"
    assert overlap.main(overlap.Config(small=True, out=out)) == 0
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == 2 * 3 * 4
    return {(cell["target"], cell["model"], cell["program"]): cell for cell in cells}


@pytest.mark.parametrize("target", ["h100:1x1x8", "h100:1x8x8"])
@pytest.mark.parametrize(
    ("model", "least"), [("mlp", 0.90), ("cnn", 0.95), ("transformer scan", 0.95)]
)
def test_pipelined_is_hidden_and_nothing_else_is(found, target, model, least):
    pipelined = found[target, model, "pipelined"]
    assert pipelined["kinds"] == ["all-reduce"]
    assert pipelined["asynchronous"] == [True]
    assert pipelined["covered"] >= least
    assert found[target, model, "D-Sync"]["covered"] == 0
    # A stale sum alone is not what hides it: this one is stale too.
    assert found[target, model, "negative control"]["covered"] < 0.5
    two_shot = found[target, model, "two-shot"]
    assert two_shot["kinds"] == ["all-to-all", "all-gather"]
    assert two_shot["asynchronous"] == [True, True]
    assert two_shot["covered"] >= 0.85


def test_with_everything_on():
    """Batch norm, AdamW, clipping, microbatches, a key, metrics: one collective."""
    cell = overlap.measured("h100:1x8x8", "resnet18", "everything")
    assert cell["asynchronous"] == [True]
    assert cell["covered"] >= 0.95


CELL = (("h100:1x1x8",), ("mlp",), ("pipelined",))


def test_what_misses_its_bar_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overlap, "judged", lambda *_: ("more than all", False))
    assert overlap.main(overlap.Config(*CELL, out=tmp_path / "out.json")) == 1
    line = "h100:1x1x8, mlp, pipelined: 1.00, 1/1; MISSED, the bar is more than all"
    assert line in capsys.readouterr().err


def test_what_does_not_compile_is_recorded(tmp_path, monkeypatch, capsys):
    def compiled(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no\nbecause")

    monkeypatch.setattr(overlap, "compiled", compiled)
    assert overlap.main(overlap.Config(*CELL, out=tmp_path / "out.json")) == 1
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert (cell["failed"], cell["met"]) == ("INTERNAL: no", False)
    assert "does not compile: INTERNAL: no\n" in capsys.readouterr().err

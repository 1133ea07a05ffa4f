"""Tests the experiment on memory with a small model on one host, and its bars."""

import json

import pytest

from experiments import memory

pytest.importorskip("jax_plugins.xla_cuda12")
pytest.importorskip("nvidia.cuda_nvcc")


@pytest.mark.full
def test_memory_of_our_step_is_compared_with_a_step_by_hand(tmp_path):
    out = tmp_path / "memory.json"
    steps = ("K=1", "K=2, predicted")
    config = memory.Config("h100:1x1x8", ("mlp",), steps, out=out)
    memory.main(config)
    cells = json.loads(out.read_text())["cells"]
    assert [cell["step"] for cell in cells] == list(steps)
    for cell in cells:
        found = cell["memory"]
        live = found["arguments"] + found["outputs"] + found["temporaries"]
        assert cell["live"] == (live - found["aliased"]) / cell["parameters"]
        assert cell["live"] > cell["limit"]
        assert cell["over_by_hand"] == pytest.approx(cell["live"] / cell["by_hand"])


def test_exit_code_is_1_if_a_bar_is_missed(tmp_path, monkeypatch):
    cell = {"model": "mlp", "step": "K=1", "live": 9.0, "limit": 3.0, "by_hand": 4.0}
    monkeypatch.setattr(
        memory, "measured", lambda *_: cell | {"covered": 1.0, "met": False}
    )
    config = memory.Config("h100:1x1x8", ("mlp",), ("K=1",), out=tmp_path / "x.json")
    assert memory.main(config) == 1

"""Tests the count of kernels with a small model on one GPU, and its bar."""

import json

import pytest

from experiments import kernels

pytest.importorskip("jax_plugins.xla_cuda12")
pytest.importorskip("nvidia.cuda_nvcc")


@pytest.mark.full
def test_kernels_of_both_steps_by_hand_are_counted(tmp_path):
    out = tmp_path / "kernels.json"
    config = kernels.Config(("h100:1x1x1",), ("mlp",), out)
    kernels.main(config)
    found = json.loads(out.read_text())["cells"]
    assert [x["step"] for x in found] == ["K=1", "K=2, plain", "K=2, predicted"]
    for cell in found:
        for name in ("pipejax", "by hand", "by hand, checked"):
            assert cell[name]["kernels"] > 3
            assert cell[name]["collectives"] == 0


def test_collectives_count_as_kernels_in_the_bar():
    ours, hand = {"kernels": 9, "collectives": 2}, {"kernels": 8, "collectives": 1}
    assert kernels.more({"pipejax": ours, "by hand": hand}) == 2


def test_rows_show_kernels_of_both_steps_by_hand():
    cell = {"target": "h100:1x1x8", "model": "mlp", "step": "K=1"}
    for place, name in enumerate(("pipejax", "by hand", "by hand, checked")):
        cell[name] = {"kernels": 9 + place, "collectives": 1}
    titles, row = kernels.rows([cell])
    assert titles == ["GPUs", "model", "K=1"]
    assert row == ["8", "mlp", "10 (11, 12)"]

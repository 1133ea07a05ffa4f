"""Tests the experiments with a sharded optimizer: their rows, and small runs."""

import json

import pytest

import pipejax as pj
from experiments import speedup
from experiments.methods import NAMES, Problem
from experiments.sharded_optimizer import accuracy, cluster, work
from pipejax.overlap import topology

from . import here


def runs(method, loss, seeds=(0, 1)):
    common = {"task": "mnist", "optimizer": "momentum", "rate": 0.1, "method": method}
    return [
        common | {"seed": seed, "test_loss": loss + 0.1 * seed, "test_accuracy": 0.9}
        for seed in seeds
    ]


def test_changes_are_taken_from_synchronous_runs_of_equal_seeds():
    others = {"seeds": [0, 1], "runs": [*runs("K=1", 0.5), *runs("K=2, plain", 0.6)]}
    titles, row = accuracy.rows(others, runs(accuracy.SHARDED, 0.505))
    assert titles[3:] == [*accuracy.BESIDE, accuracy.SHARDED]
    assert row[:3] == ["mnist", "momentum", "0.5500"]
    assert row[3].startswith("+0.1000 ± 0.0000")
    assert row[4] == ""
    assert row[5] == "+0.0050 ± 0.0000, +0.00 ± 0.00"


@pytest.mark.full
def test_finished_runs_are_kept_and_not_repeated(tmp_path, monkeypatch):
    result = {"seeds": [0], "runs": [{**x, "task": "digits"} for x in runs("K=1", 1)]}
    rates = accuracy.OPTIMIZERS["momentum"].rates
    result["runs"] = [x | {"rate": rate} for x in result["runs"] for rate in rates]
    monkeypatch.setattr(accuracy, "unsharded", lambda: result)
    monkeypatch.setattr(
        accuracy,
        "train",
        lambda *args, **options: {"test_loss": 1.0, "test_accuracy": 0.5},
    )
    monkeypatch.setattr(accuracy, "make_task", lambda *args, **options: None)
    here.limit_devices(monkeypatch)
    out = tmp_path / "out.json"
    config = accuracy.Config(("digits",), ("momentum",), (0, 1), out=out)
    accuracy.main(config)
    accuracy.main(config)
    assert [x["seed"] for x in json.loads(out.read_text())["runs"]] == [0, 0, 1, 1]


def test_rows_of_the_cluster_show_times_and_ratios():
    row = {"step": 0.5, "wire": 0.4, "cores": 0.3, "ratio_to_limit": 1.25}
    cell = {
        "problem": {"model": "mlp", "batch_size": 64},
        "rate": "500mbit",
        "rows": {"D-Sync": row, "Pipe-SGD": row},
        "measured": {"Pipe-SGD": {"ratio": [1.0, 1.1, 1.2]}},
    }
    _, sync, pipelined = speedup.table_rows([cell])
    assert sync == ["mlp, 64, 500mbit", "D-Sync", "500", "1.25", "", "400", "300"]
    assert pipelined[4] == "1.10"


def test_update_times_are_given_whole_and_for_a_quarter():
    found = cluster.update_times(Problem("mlp", 8), rounds=2)
    assert {name: len(times) for name, times in found.items()} == {
        "whole": 2,
        "quarter": 2,
    }


def test_every_method_has_a_display_name():
    assert set(cluster.METHODS) <= NAMES.keys()


def test_rows_of_work_show_the_whole_step_in_brackets():
    cells = [
        {
            "model": "mlp",
            "step": "K=1",
            "devices": devices,
            "whole": {"flops": 22.0, "copies": 8.0},
            "sharded": {"flops": 22 / devices, "copies": 8 / devices},
        }
        for devices in work.TARGETS
    ]
    titles, row = work.rows(cells)
    assert titles[2:5] == ["FLOPs, 1 GPU", "FLOPs, 8 GPUs", "FLOPs, 64 GPUs"]
    assert row[:5] == ["mlp", "K=1", "22.0 (22.0)", "2.8 (22.0)", "0.3 (22.0)"]
    assert row[5:] == ["8.0 (8.0)", "1.0 (8.0)", "0.1 (8.0)"]


@pytest.mark.full
def test_sharded_update_takes_its_share_of_the_work(monkeypatch):
    """On one GPU the work is that of the whole step, and on eight an eighth."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    pytest.importorskip("nvidia.cuda_nvcc")
    alone = work.of_gradients("mlp")
    of_step = {
        devices: [
            work.of_step("mlp", step, pj.data_mesh(devices=topology(target)), alone)
            for step in ("K=1", "K=1, sharded")
        ]
        for devices, target in work.TARGETS.items()
        if devices < 64
    }
    whole, sharded = of_step[1]
    assert sharded == whole
    assert whole["flops"] > 15  # those of AdamW
    assert of_step[8][1]["flops"] < whole["flops"] / 7

"""Tests the experiments with a sharded optimizer: their rows, and small runs."""

import json

import pytest

from experiments import speedup
from experiments.methods import NAMES, Problem
from experiments.sharded_optimizer import accuracy, cluster

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

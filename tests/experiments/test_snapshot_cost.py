"""Tests the experiment on the cost of snapshots: a small run, and its table."""

import json

import pytest

from experiments import cluster
from experiments.snapshot_cost import __main__ as snapshot_cost

WHY_NOT = cluster.reason_why_not()


@pytest.mark.full
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_costs_are_measured_on_two_hosts(tmp_path, capsys):
    out = tmp_path / "found.json"
    config = snapshot_cost.Config(widths=(64,), pace=0.01, steps=300, out=out)
    snapshot_cost.main(config)
    (cell,) = json.loads(out.read_text())["cells"]
    # Five copies of the parameters, and some numbers.
    assert cell["bytes"] == pytest.approx(5 * 12 * 64 * 64 * 4, rel=0.01)
    assert cell["snapshots"] >= 3
    assert cell["memory"] > 2 * cell["bytes"]
    assert min(cell[name] for name in ("stop", "own", "other", "disk")) > 0
    assert "snapshots" in capsys.readouterr().out


def test_limit_of_a_restore_lies_in_the_link():
    cell = {"bytes": 2e8, "stop": 0.1, "copy": 0.05, "beside": 1.0}
    cell |= {"steps_between": 20, "share": 0.01, "memory": 5e8}
    cell |= {"own": 0.5, "other": 3.0, "disk": 1.0}
    titles, row = snapshot_cost.rows([cell], "1gbit")
    shown = dict(zip(titles, row, strict=True))
    assert shown["its bytes on the link, s"] == "1.6"
    assert shown["share of the time, %"] == "1.00"

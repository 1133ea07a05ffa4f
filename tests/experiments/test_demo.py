"""Tests the demo: its command, with small settings, and its conclusion."""

import pytest
from rich.console import Console

from experiments import cluster, demo

from .test_cluster import needs_namespaces
from .test_measurements import experiment


@pytest.mark.full
@pytest.mark.parametrize("hosts", [0, 2])
def test_demo_prints_both_methods_and_draws_their_accuracy(tmp_path, hosts):
    size = ("--steps", "40", "--hosts", str(hosts), "--host-steps", "3")
    printed = experiment("demo", "--out", str(tmp_path), *size)
    assert "D-Sync (K=1)" in printed
    assert "Pipe-SGD (K=2)" in printed
    assert "there is no exchange to hide" in printed
    if why := cluster.reason_why_not() if hosts else "The flag says --hosts 0.":
        assert f"Training on emulated hosts is left out. {why}" in printed
    else:
        assert "Shown: on 2 hosts Pipe-SGD took" in printed
    assert "docs/getting_started.md" in printed
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


@pytest.mark.full
@needs_namespaces
def test_demo_on_hosts_counts_the_bytes_of_each_method(tmp_path, capsys):
    config = demo.Config(hosts=2, host_steps=3, out=tmp_path)
    runs = demo.on_hosts(config, Console(width=100))
    found = demo.rows(runs)
    assert list(found) == ["compute", "D-Sync", "Pipe-SGD", "Pipe-SGD, int8"]
    vector = 4 * demo.RACE.problem.elements
    assert found["compute"]["wire_bytes"] < 0.02 * vector
    # Each of two hosts sends a whole vector in total.
    for name in ("D-Sync", "Pipe-SGD"):
        assert vector < found[name]["wire_bytes"] < 1.2 * vector
    assert vector / 4 < found["Pipe-SGD, int8"]["wire_bytes"] < 1.2 * vector / 4
    assert all(row["limit"] >= found["compute"]["step"] for row in found.values())
    assert "8-bit gradients send 0.2" in capsys.readouterr().out
    assert (tmp_path / "hosts.log").stat().st_size > 0
    demo.draw(runs, tmp_path / "accuracy.png", "2 hosts")
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_conclusion_of_the_demo_follows_the_figures():
    """The conclusion follows the figures, whatever they are."""
    figures = {
        "compute": (0.90, 1.0, 0.0),
        "D-Sync": (0.98, 4.0, 25e6),
        "Pipe-SGD": (0.97, 3.0, 25e6),
        "Pipe-SGD, int8": (0.98, 5.0, 6e6),
    }
    runs = {
        name: {
            "accuracy": [0.5, accuracy],
            "seconds": [0.0, seconds],
            "steps": [1, 11],
            "wire_bytes": wire,
        }
        for name, (accuracy, seconds, wire) in figures.items()
    }
    found = demo.rows(runs)
    assert [row["step"] for row in found.values()] == [0.1, 0.4, 0.3, 0.5]
    # 25 MB take 0.2 s at 1 Gbit/s, and 6 MB take less time than the compute.
    assert [row["limit"] for row in found.values()] == [0.1, 0.2, 0.2, 0.1]
    assert (found["D-Sync"]["goal"], found["compute"]["goal"]) == (4.0, None)
    said = demo.conclusion(found, 4)
    assert "on 4 hosts Pipe-SGD took 0.75 of D-Sync's time" in said
    assert "with 8-bit gradients 1.25, and ended 1.0 points below it" in said

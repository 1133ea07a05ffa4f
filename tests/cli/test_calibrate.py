"""`pipejax calibrate`: on devices of one process, and on hosts of a cluster."""

import json
import math
import sys

import pytest

from experiments import cluster
from pipejax import timing
from pipejax.cli import main

from ..experiments.test_cluster import needs_namespaces, run


def test_here(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = tmp_path / "cluster.json"
    assert main(["calibrate", "--out", str(out), "--rounds", "1", "--codecs"]) == 0
    found = timing.from_json(json.loads(out.read_text()))
    assert found.hosts == 8
    assert found.codecs == {}
    printed = capsys.readouterr().out
    assert printed.startswith("latency ")
    assert "psum 2097152" in printed


@needs_namespaces
def test_on_a_cluster(tmp_path):
    """It finds the rate that the links were given, within 3: the machine is busy."""
    out = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "pipejax.cli", "calibrate", "--out", str(out)]
    code, hosts, said = run(
        *("--hosts", "2", "--rate", "100mbit"),
        command=[*command, "--rounds", "3", "--codecs", "int8"],
    )
    assert code == 0, (said, hosts)
    found = timing.from_json(json.loads(out.read_text()))
    assert found.hosts == 2
    rate = cluster.bits_per_second("100mbit") / 8
    assert rate / 3 < found.link.bandwidth < 3 * rate
    assert 0 < found.codec("int8").encode < math.inf
    assert any("measured" in line for line in hosts["host0"])
    assert not any("measured" in line for line in hosts["host1"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rounds", "0"], "pipejax: `--rounds` must be at least 1, got 0"),
        (["--codecs", "int9"], "pipejax: `name` must be one of bf16, truncate"),
    ],
)
def test_refusals(capsys, flags, says):
    assert main(["calibrate", *flags]) == 2
    assert capsys.readouterr().err.startswith(says)

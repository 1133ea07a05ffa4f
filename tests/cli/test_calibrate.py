"""Tests `pipejax calibrate` on the devices of one process and on hosts of a cluster."""

import json
import math
import pathlib
import shlex
import sys

import pytest

from experiments import cluster
from pipejax import timing
from pipejax.cli import main

from ..experiments.test_cluster import needs_namespaces, run


@pytest.mark.full
def test_calibration_on_one_machine_is_printed_and_written(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = tmp_path / "cluster.json"
    assert main(["calibrate", "--out", str(out), "--rounds", "1", "--codecs"]) == 0
    record = json.loads(out.read_text())
    found = timing.from_json(record["cluster"])
    assert found.hosts == 8
    assert found.codecs == {}
    printed = capsys.readouterr().out
    assert printed.startswith("latency ")
    assert "psum 2097152" in printed
    assert record["fit"]["largest"] == 2097152
    assert printed.endswith(record["fit"]["verdict"] + "\n")


MODEL = """
import jax
import jax.numpy as jnp
import optax

import pipejax as pj


def loss_fn(w, batch):
    return jnp.mean((batch @ w) ** 2)


def step(mesh):
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh)
    return train, train.init(jnp.ones((16, 3))), jnp.ones((64, 16))


def shapes(mesh):
    return jax.eval_shape(lambda: 0), *step(mesh)[1:]


def no_arrays(mesh):
    train, state, _ = step(mesh)
    return train, state, jax.ShapeDtypeStruct((64, 16), jnp.float32)
"""


def calibrate_model(tmp_path, function, *flags):
    path = tmp_path / "calibrated_model.py"
    path.write_text(MODEL)
    model = ["--model", f"{path}:{function}"]
    return main(["calibrate", "--rounds", "2", "--codecs", *model, *flags])


def test_compute_of_a_model_is_measured_and_accepted_by_plan(
    tmp_path, capsys, monkeypatch
):
    """The speeds are printed and saved, and `pipejax plan` accepts the last line."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    # Each size compiles one program for every algorithm, so two sizes are used, not
    # five.
    out, sizes = str(tmp_path / "cluster.json"), ("--sizes", "20", "4k")
    assert calibrate_model(tmp_path, "step", "--out", out, *sizes) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("latency ")
    assert "psum 4000" in printed
    record = json.loads(pathlib.Path(out).read_text())
    found = timing.from_json(record["cluster"])
    assert found.hosts == 8
    assert found.codecs == {}
    *_, verdict, flags = printed.splitlines()
    assert verdict == record["fit"]["verdict"]
    # Two rounds do not show how much the times vary.
    assert verdict.startswith(
        "This fit cannot be trusted. Each exchange was measured 2"
    )
    samples = record["fit"]["samples"]
    assert len(samples) == 2 * 5
    assert samples[1]["name"] == "psum 4000"
    assert samples[1]["elements"] == record["fit"]["largest"] == 4000
    assert len(samples[1]["measured"]) == 2
    assert samples[1]["predicted"] > 0
    name, *flags = flags.split()
    assert (name, flags[:3]) == ("model:", ["--parameters", "48", "--compute-ms"])
    assert float(flags[3]) > 0
    assert flags[4:6] == ["--batch", "8"]
    # What predictions compute, unless it is too short to be measured.
    assert flags[6:7] in ([], ["--update-ms"])
    assert main(["plan", out, *flags]) == 0
    assert capsys.readouterr().out.startswith(verdict)


def test_model_larger_than_the_measured_vectors_is_called_extrapolated(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert calibrate_model(tmp_path, "step", "--sizes", "8", "16") == 0
    assert capsys.readouterr().out.splitlines()[-2] == (
        "Extrapolated: the gradient has 3.0 times the elements of the largest vector"
        " measured, 16."
    )


@pytest.mark.parametrize("function", ["shapes", "no_arrays"])
def test_model_without_a_train_step_and_arrays_is_refused(tmp_path, capsys, function):
    assert calibrate_model(tmp_path, function) == 2
    said = capsys.readouterr().err
    assert "must return (train, state, batch) with a train step or local step" in said


@pytest.mark.full
@needs_namespaces
def test_calibration_on_a_cluster_finds_the_bandwidth_of_the_links(tmp_path):
    """Finds the bandwidth of the links within a factor of 3: the machine is busy."""
    out = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "pipejax.cli", "calibrate", "--out", str(out)]
    code, hosts, said = run(
        *("--hosts", "2", "--rate", "100mbit"),
        command=[*command, "--rounds", "3", "--codecs", "int8"],
    )
    assert code == 0, (said, hosts)
    found = timing.from_json(json.loads(out.read_text())["cluster"])
    assert found.hosts == 2
    rate = cluster.bits_per_second("100mbit") / 8
    assert rate / 3 < found.link.bandwidth < 3 * rate
    assert 0 < found.codec("int8").encode < math.inf
    assert any("measured" in line for line in hosts["host0"])
    assert not any("measured" in line for line in hosts["host1"])


@pytest.mark.full
@needs_namespaces
def test_calibration_finds_the_bandwidth_shared_by_two_devices(tmp_path):
    """Each host has two processes, which both send over its link."""
    out = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "pipejax.cli", "launch", "--processes", "2"]
    script = shlex.join([*command, "--hosts", "2", "--host"]) + (
        " $RANK --coordinator $MASTER_ADDR:29600 -- "
        + shlex.join([sys.executable, "-m", "pipejax.cli", "calibrate", "--hosts", "2"])
        + f" --rounds 3 --codecs int8 --out {shlex.quote(str(out))}"
    )
    code, hosts, said = run(
        *("--hosts", "2", "--rate", "100mbit"), command=["sh", "-c", f"exec {script}"]
    )
    assert code == 0, (said, hosts)
    found = timing.from_json(json.loads(out.read_text())["cluster"])
    assert (found.hosts, found.devices) == (2, 2)
    rate = cluster.bits_per_second("100mbit") / 8
    assert rate / 3 < found.link.bandwidth < 3 * rate
    assert found.inner.bandwidth > found.link.bandwidth


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rounds", "0"], "pipejax: `--rounds` must be at least 1, got 0"),
        (
            ["--rounds", "1", "--model", "m:f"],
            "pipejax: `--rounds` must be at least 2, got 1",
        ),
        (["--model", "gone:f"], "pipejax: there is no module 'gone'"),
        (["--sizes", "4M", "0"], "pipejax: `--sizes` must be a whole number above 0"),
        (["--codecs", "int9"], "pipejax: `--codecs` must be names out of bf16, "),
    ],
)
def test_bad_flags_of_calibrate_are_refused(capsys, flags, says):
    assert main(["calibrate", *flags]) == 2
    assert capsys.readouterr().err.startswith(says)

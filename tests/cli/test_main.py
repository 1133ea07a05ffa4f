"""Tests `pipejax` as a whole: its version, examples, order of work and broken pipes."""

import os
import shlex
import subprocess
import sys

import jax
import pytest

import pipejax as pj
from pipejax.cli import main
from pipejax.cli._main import _COMMANDS

from ..command import run


def test_version_flag_prints_versions_of_pipejax_and_jax(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said == f"pipejax {pj.__version__}, JAX {jax.__version__}\n"


def test_package_and_cli_run_as_modules(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    said = capsys.readouterr().out
    for module in ("pipejax", "pipejax.cli"):
        assert run(sys.executable, "-m", module, "--version") == said


@pytest.mark.parametrize("command", _COMMANDS)
def test_example_of_each_command_can_be_parsed(command, monkeypatch):
    monkeypatch.setattr(command, "run", lambda args: 3)
    words = shlex.split(command.EXAMPLE.removeprefix("srun "))
    assert words[0] == "pipejax"
    assert main(words[1:]) == 3


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "--codecs", "power_sgd", "--model", "gone:f"],
        ["profile-allreduce", "--codecs", "power_sgd", "--algorithms", "ring"],
    ],
    ids=lambda command: command[0],
)
def test_processes_are_joined_before_codecs_are_made(monkeypatch, capsys, command):
    """A codec's key is an array, and JAX joins no processes once there are arrays."""
    monkeypatch.setattr(pj.launch, "initialize", lambda: made.append("joined"))
    made = []
    for name, make in pj.codecs.NAMES.items():
        monkeypatch.setitem(
            pj.codecs.NAMES, name, lambda make=make: made.append("codec") or make()
        )
    assert main(command) == 2  # neither the module nor the pair exists
    assert made == ["joined", "codec"]
    assert "pipejax: " in capsys.readouterr().err


def test_plan_needs_no_accelerator_and_no_reader():
    """`pipejax plan` is arithmetic: it works beside a job on the GPU, and in a pipe."""
    cluster = ["--hosts", "2", "--bandwidth", "1gbit"]
    model = ["--parameters", "1M", "--compute-ms", "1"]
    readable, writable = os.pipe()
    os.close(readable)
    ended = subprocess.run(
        [sys.executable, "-m", "pipejax.cli", "plan", *cluster, *model],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        stdout=writable,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writable)
    assert ended.returncode == 1
    assert "Error" not in ended.stderr

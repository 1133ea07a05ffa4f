"""Tests `initialize`: its arguments, and two processes that really join."""

import subprocess
import sys
from typing import NamedTuple

import jax
import pytest

from pipejax import launch
from pipejax.launch import _initialize

from .helpers import OWN


@pytest.mark.parametrize("given", [("host:1",), ("host:1", 2), (None, 2, 0)])
def test_arguments_must_be_given_together_or_not_at_all(environ, given):
    environ(OWN)
    with pytest.raises(ValueError, match="must be given together, or none"):
        launch.initialize(*given)


def test_process_without_a_launcher_runs_alone(environ, caplog):
    environ({})
    with caplog.at_level("INFO", "pipejax"):
        assert launch.initialize() is None
    assert "no launcher found: this process runs alone" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": 0.0}, r"`timeout` must lie in \(0, 1e6\] seconds, got 0.0"),
        ({"timeout": float("inf")}, "`timeout` must lie in .* got inf"),
        ({"timeout": float("nan")}, "`timeout` must lie in .* got nan"),
        ({"bind": "0.0.0.0"}, "`bind` must be host:port, got '0.0.0.0'"),
        ({"bind": "[::]:99999"}, "`bind` must be host:port"),
    ],
)
def test_bad_arguments_are_named_before_joining(environ, given, message):
    environ(OWN)
    with pytest.raises(ValueError, match=message):
        launch.initialize(**given)


PROGRAM = """
import sys
import jax
import pipejax as pj

rank, port, setting = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_threefry_partitionable", bool(setting))
jax.config.update("jax_num_cpu_devices", 2)
place = pj.launch.initialize(f"127.0.0.1:{port}", 2, rank, timeout=60)
print(place.rank, jax.process_count(), len(jax.devices()), flush=True)
"""


def programs(port, *settings):
    """Runs two processes as a user would; returns their outputs and exit statuses."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(setting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, setting in enumerate(settings)
    ]
    try:
        return [(*each.communicate(timeout=240), each.returncode) for each in running]
    finally:
        for each in running:
            each.kill()


@pytest.mark.full  # in the quick run, the jobs of other files join
def test_two_processes_join_and_see_all_devices(port):
    for rank, (out, errors, code) in enumerate(programs(port, 1, 1)):
        assert code == 0, errors
        assert out == f"{rank} 2 4\n"


def test_processes_must_have_equally_many_devices(monkeypatch):
    """If a host has lost a GPU, its process still sees the devices of the others."""

    class Device(NamedTuple):
        process_index: int

    monkeypatch.setattr(jax, "devices", lambda: [Device(0), Device(0), Device(1)])
    says = "2 in process 0 on host0, 1 in process 1 on host1"
    with pytest.raises(launch.RollCallError, match=says):
        _initialize.check_devices(["host0", "host1"])


def test_two_processes_of_other_settings_do_not_join(port):
    for _, errors, code in programs(port, 1, 0):
        assert code == 1
        says = "jax_threefry_partitionable must be the same in all processes; got"
        assert f"{says} 'True' in process 0 on" in errors

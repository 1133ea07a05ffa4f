"""Tests how many threads XLA:CPU has, and that no train step has too few."""

import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax._internal import threads

from ..launch.helpers import free_port


def test_threads_of_the_process_are_counted():
    jax.devices()
    assert threads.running() == int(os.environ["NPROC"])  # set in conftest.py


@pytest.mark.parametrize(
    ("setting", "flags", "devices", "least"),
    [
        (-1, "", 1, 2),
        (1, "--xla_force_host_platform_device_count=4", 1, 2),
        (2, "", 2, 6),
        (-1, "--xla_force_host_platform_device_count=4", 4, 12),
    ],
)
@pytest.mark.parametrize(("given", "cores"), [("", 1), ("3", 64), ("many", 8)])
def test_number_of_threads_is_raised_only_if_too_small(
    monkeypatch, setting, flags, devices, least, given, cores
):
    """The number of cores, or a number that the user has set, stays if it is enough."""
    config = types.SimpleNamespace(jax_num_cpu_devices=setting)
    monkeypatch.setattr(threads.jax, "config", config)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("NPROC", given)
    assert threads.configured_devices() == devices
    threads.set_enough()
    own = 3 if given == "3" else cores
    assert os.environ["NPROC"] == (given if own >= least else str(least))


def mesh_of(devices, processes=2, platform="cpu"):
    """Returns what `check_threads` reads of a mesh."""
    return types.SimpleNamespace(
        is_multi_process=processes > 1,
        devices=np.array([types.SimpleNamespace(platform=platform)]),
        local_devices=[None] * devices,
    )


def test_too_few_threads_are_refused(monkeypatch):
    monkeypatch.setattr(threads, "running", lambda: 5)
    message = (
        "`mesh` must lie on processes with at least 6 threads of XLA where 2 CPU"
        " devices of each are used, .* this process has 5. Call pj.launch.initialize.*"
        " or set NPROC=6 in the environment before JAX is asked"
    )
    with pytest.raises(ValueError, match=message):
        threads.check_threads(mesh_of(2))


@pytest.mark.parametrize(
    ("mesh", "there"),
    [
        (mesh_of(2), 6),
        (mesh_of(2), None),  # a system that does not list threads
        (mesh_of(1), 1),  # slow, but nothing waits for ever
        (mesh_of(8, processes=1), 8),
        (mesh_of(8, platform="gpu"), 0),
        (mesh_of(100), 256),  # XLA's limit
    ],
)
def test_enough_threads_are_accepted(monkeypatch, mesh, there):
    monkeypatch.setattr(threads, "running", lambda: there)
    threads.check_threads(mesh)


PROGRAM = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import optax
import pipejax as pj
from pipejax._internal import threads

rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
join = pj.launch.initialize if how == "pipejax" else jax.distributed.initialize
join(f"127.0.0.1:{port}", 2, rank)
mesh = pj.data_mesh(axis_name=("host", "device"))
try:
    pj.make_train_step(len, optax.sgd(0.1), mesh=mesh, axis_name="host")
    print("made with", threads.running())
except ValueError as error:
    print(error)
"""


@pytest.mark.full  # two processes start for each; the others are tested above
@pytest.mark.parametrize(
    ("how", "said"), [("pipejax", "made with 6"), ("jax", "this process has 2. Call")]
)
def test_two_processes_with_two_devices_need_six_threads(how, said):
    command = [sys.executable, "-c", PROGRAM]
    port = str(free_port())
    started = [
        subprocess.Popen(
            [*command, str(rank), port, how],
            env={**os.environ, "NPROC": "2", "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for each in started:
        assert said in each.communicate(timeout=120)[0]


def test_train_step_checks_its_mesh(monkeypatch):
    def refused(mesh):
        raise ValueError(f"{mesh.size} devices")

    monkeypatch.setattr("pipejax.train_step._make.check_threads", refused)
    with pytest.raises(ValueError, match="4 devices"):
        pj.make_train_step(len, None, mesh=pj.data_mesh(4))

"""
Tests that a job that is told to end saves one checkpoint, and fails nowhere.

When the job is started again, it ends with the bits of an undisturbed one.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from ..helpers import batches, init_params
from .preempted import STEPS, digest, made

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path):
    """Starts the job, and ends it after the test."""
    started = []

    def begun(processes):
        launch = [sys.executable, "-m", "pipejax.cli", "launch", "--processes"]
        program = [sys.executable, "-m", "tests.launch.preempted", str(tmp_path)]
        command = [*launch, str(processes), "--grace", "60", "--", *program]
        started.append(subprocess.Popen(command, cwd=ROOT))
        return started[-1]

    yield begun
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.parametrize(
    ("processes", "told"),
    [
        pytest.param(2, "one", marks=pytest.mark.full),
        pytest.param(1, "launcher", marks=pytest.mark.full),
        pytest.param(3, "launcher", marks=pytest.mark.full),
        pytest.param(3, "one", marks=pytest.mark.full),
    ],
)
def test_processes_save_the_same_step_and_continue_there(
    start, tmp_path, processes, told
):
    first, end = start(processes), time.monotonic() + 120
    while len(list(tmp_path.glob("running*"))) < processes:
        assert first.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    if told == "launcher":
        first.send_signal(signal.SIGTERM)
    else:
        pid = int((tmp_path / f"running{processes - 1}").read_text())
        os.kill(pid, signal.SIGTERM)
    assert first.wait(timeout=120) == 0
    assert not list(tmp_path.glob("ended*"))

    assert start(processes).wait(timeout=120) == 0
    ends = [path.read_text().split() for path in tmp_path.glob("ended*")]
    assert len(ends) == processes
    assert len({begun for begun, _ in ends}) == 1
    assert 3 < int(ends[0][0]) < STEPS

    train = made(processes)
    state = train.init(init_params())
    for batch in batches(STEPS, size=12):
        state, _ = train.step(state, batch)
    assert {bits for _, bits in ends} == {digest(train.drain(state)[0].params)}

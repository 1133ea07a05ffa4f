"""A job that is told to end: all its processes save the same step, and end well."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from .helpers import free_port

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("processes", [1, 3])
def test_all_save_the_same_step_and_end_well(tmp_path, processes):
    variables = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(processes),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.launch.preempted", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, **variables, "JAX_PROCESS_ID": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("running*"))) < processes:
            assert time.monotonic() < end
            time.sleep(0.1)
        running[-1].send_signal(signal.SIGTERM)
        assert [each.wait(timeout=120) for each in running] == [0] * processes
    finally:
        for each in running:
            each.kill()
            each.wait()
    saved = {path.name: path.read_text() for path in tmp_path.glob("saved*")}
    assert saved.keys() == {f"saved{rank}" for rank in range(processes)}
    assert len(set(saved.values())) == 1

"""Two processes over Gloo, started as a user would start two hosts."""

import json
import pathlib
import signal
import subprocess
import sys

import optax
import pytest

import pipejax as pj

from ..helpers import batches, init_params, loss_fn
from ..launch.helpers import free_port
from .worker import SECONDS, bits, exchanges

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def start():
    """Starts both processes of a task; none outlives the test."""
    running = []

    def start_both(task):
        port = free_port()
        for rank in (0, 1):
            command = [sys.executable, "-m", "tests.executors.worker", task]
            running.append(
                subprocess.Popen(
                    [*command, str(rank), str(port)],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return running

    yield start_both
    for process in running:
        process.kill()
        process.communicate()


def results(processes):
    out = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        out.append(json.loads(stdout.splitlines()[-1]))
    return out


def test_same_bits_as_one_process(start):
    """The host executor is chosen, and says why; both ranks agree, at three widths."""
    first, second = results(start("exact"))
    assert first == second
    assert first["executor"] == "host"
    assert "2 processes on CPU" in first["reason"]
    for width in (1, 2, 3):
        train = pj.make_train_step(
            loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(2), width=width
        )
        state = train.init(init_params())
        for batch in batches(6):
            state, _ = train.step(state, batch)
        assert bits(train.drain(state).params) == first["params"][str(width)]


def test_same_bits_as_one_process_with_codecs(start):
    """Residuals, keys and warm starts are each process's own, as each device's."""
    first, second = results(start("coded"))
    assert first == second
    for name, all_reduce in exchanges().items():
        train = pj.make_train_step(
            loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh(2), all_reduce=all_reduce
        )
        state = train.init(init_params())
        for batch in batches(6):
            state, _ = train.step(state, batch)
        assert bits(train.drain(state).params) == first[name]


def test_takes_the_longer_of_compute_and_communication(start):
    """Both take `SECONDS`: in turn at width 1, at once at width 2.

    Of 8 steps and a drain a step takes 2 x SECONDS, or 9/8 x SECONDS: 1.5 tells them
    apart.
    """
    for seconds in results(start("late")):
        assert seconds["1"] >= 2 * SECONDS
        assert seconds["2"] < 1.5 * SECONDS


def test_interrupted_while_it_waits_for_the_other(start):
    waiting, silent = start("interrupted")
    for process in (waiting, silent):
        while process.stdout.readline() != "waiting\n":
            assert process.poll() is None, process.stderr.read()
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(2)  # it does wait
    waiting.send_signal(signal.SIGINT)
    _, stderr = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert "KeyboardInterrupt" in stderr
    assert "leaving without it" in stderr

"""Several processes over Gloo, started as a user would start hosts."""

import json
import pathlib
import signal
import subprocess
import sys

import optax
import pytest

import pipejax as pj
from pipejax import checkpoint

from ..helpers import batches, init_params, loss_fn
from ..launch.helpers import free_port
from .worker import SECONDS, bits, exchanges, fed_back, in_rank_order, run

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def start():
    """Starts the processes of a task; none outlives the test."""
    running = []

    def start_all(task, processes=2, *folder):
        port = free_port()
        for rank in range(processes):
            command = [sys.executable, "-m", "tests.executors.worker", task]
            running.append(
                subprocess.Popen(
                    [*command, *map(str, (rank, processes, port, *folder))],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return running

    yield start_all
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


@pytest.mark.parametrize("processes", [2, 4])
def test_same_bits_as_one_process(start, processes):
    """The host executor is chosen, and says why; all ranks agree, at three widths."""
    first, *others = results(start("exact", processes))
    assert all(other == first for other in others)
    assert first["executor"] == "host"
    assert f"{processes} processes on CPU" in first["reason"]
    for width in (1, 2, 3):
        train = pj.make_train_step(
            loss_fn,
            optax.adamw(1e-2),
            mesh=pj.data_mesh(processes),
            width=width,
            all_reduce=in_rank_order(processes),
        )
        state = train.init(init_params())
        for batch in batches(6):
            state, _ = train.step(state, batch)
        assert bits(train.drain(state).params) == first["params"][str(width)]


@pytest.mark.parametrize("processes", [2, 4])
def test_same_bits_as_one_process_with_codecs(start, processes):
    """Residuals, keys and warm starts are each process's own, as each device's."""
    first, *others = results(start("coded", processes))
    assert all(other == first for other in others)
    for name, all_reduce in exchanges(processes).items():
        train = pj.make_train_step(
            loss_fn,
            optax.adamw(1e-2),
            mesh=pj.data_mesh(processes),
            all_reduce=all_reduce,
        )
        state = train.init(init_params())
        for batch in batches(6):
            state, _ = train.step(state, batch)
        assert bits(train.drain(state).params) == first[name]


def test_checkpoint_of_two_processes_goes_on_in_one(start, tmp_path):
    assert results(start("saved", 2, tmp_path)) == [None, None]
    alone = tmp_path / "alone"
    state = run(train := fed_back(2), 4, drained=False)
    with checkpoint.manager(alone) as manager:
        checkpoint.save(manager, state)
    state = run(train, 4, state)
    assert goes_on(tmp_path, 2) == goes_on(alone, 2) == bits(state.params)


@pytest.mark.parametrize("devices", [2, 4])
def test_checkpoint_of_one_process_goes_on_in_two(start, tmp_path, devices):
    """Of as many devices, and of twice as many, whose residuals are handed on."""
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, run(fed_back(devices), 4, drained=False))
    first, second = results(start("restored", 2, tmp_path))
    assert first == second == goes_on(tmp_path, 2)


def goes_on(folder, devices):
    """The same in this process."""
    train = fed_back(devices)
    with checkpoint.manager(folder) as manager:
        state = checkpoint.restore(manager, train, train.init(init_params())).state
    return bits(run(train, 4, state).params)


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

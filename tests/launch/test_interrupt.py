"""Tests that Ctrl-C ends all processes of a job, which are at different steps."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import checkpoint

from .helpers import OWN

PROGRAM = """
import pathlib, sys, time
import jax, numpy as np, optax
import pipejax as pj
from pipejax import checkpoint
from pipejax._internal import leaving

# On a busy machine, the processes may be seconds apart. They must not need the limits.
leaving.LIMIT = leaving._GOODBYE = 40.0
how, ahead, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
pj.launch.initialize()
rank = jax.process_index()
loss_fn = lambda w, batch: ((batch["x"] @ w - 1) ** 2).mean()
train = pj.make_train_step(loss_fn, optax.sgd(0.05), mesh=pj.data_mesh())


def steps(state, count):
    batch = {"x": np.ones((4, 4), np.float32)}
    for _ in range(count):
        state, _ = train.step(state, train.batch(batch))
    return state


def loop():
    state = steps(train.init(np.zeros((4, 4), np.float32)), 8)
    if how == "saving":
        with checkpoint.manager(folder / "saved") as manager:
            checkpoint.save(manager, state)
            manager.wait_until_finished()
            checkpoint.save(manager, steps(state, 2))
            raise KeyboardInterrupt
    if rank == ahead:
        if how == "stuck":  # in C++, until the other process has gone
            (folder / "ready").touch()
            train.fewest_batches(1)
        state = steps(state, 1)
    elif how == "stuck":
        time.sleep(600)
    raise KeyboardInterrupt  # the moment of Ctrl-C


if how == "caught":
    try:
        loop()
    except KeyboardInterrupt:
        print("caught", flush=True)
else:
    loop()
"""


@pytest.fixture
def ended(tmp_path, port):
    """Runs two processes, and returns the exit status and output of each."""
    # SIGINT is ignored if the tests run in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = []

    def run(how, ahead):
        for rank in range(2):
            place = (f"127.0.0.1:{port}", "2", str(rank))
            environ = {**os.environ, **dict(zip(OWN, place, strict=True))}
            command = [sys.executable, "-c", PROGRAM, how, str(ahead), str(tmp_path)]
            running.append(
                subprocess.Popen(
                    command,
                    env=environ | {"JAX_PLATFORMS": "cpu"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        if how == "stuck":
            while not (tmp_path / "ready").exists():
                time.sleep(0.1)
            time.sleep(1)  # until the process is inside of the call
            for each in running:
                each.send_signal(signal.SIGINT)
        found = [each.communicate(timeout=120)[0] for each in running]
        return list(zip([each.returncode for each in running], found, strict=True))

    yield run
    signal.signal(signal.SIGINT, before)
    for each in running:
        each.kill()
        each.wait()


@pytest.mark.full  # in the quick run, tests/internal/test_leaving.py
@pytest.mark.parametrize("ahead", [0, 1])
def test_interrupt_ends_a_process_ahead_by_a_step(ended, ahead):
    """The other would wait for it until JAX aborts it, for 90 seconds."""
    codes = [code for code, _ in ended("raised", ahead)]
    # The one that is ahead gives up its reduction. The other ends as Python does.
    assert codes[ahead] == 130
    assert codes[1 - ahead] in (130, -signal.SIGINT)


@pytest.mark.full  # the interrupt ends the same way, later
@pytest.mark.parametrize("ahead", [0, 1])
def test_caught_interrupt_is_followed_by_a_bounded_exit(ended, ahead):
    found = ended("caught", ahead)
    assert all("caught" in said for _, said in found)
    assert found[ahead][0] == 1
    assert "leaving without it" in found[ahead][1]
    assert found[1 - ahead][0] == 0


@pytest.mark.full  # a process of its own tests this in the quick run
def test_interrupt_ends_a_process_in_a_collective(ended):
    """It fails when the other has gone, and so notices the interrupt.

    JAX may have aborted it first, because process 0 is gone.
    """
    found = ended("stuck", 0)
    assert found[1][0] in (130, -signal.SIGABRT)
    assert found[0][0] in (130, -signal.SIGINT, 1)


@pytest.mark.full  # three processes
def test_interrupted_checkpoint_is_whole_or_absent(ended, tmp_path):
    codes = [code for code, _ in ended("saving", 0)]
    assert set(codes) <= {130, -signal.SIGINT}

    def loss_fn(w, batch):
        return ((batch["x"] @ w - 1) ** 2).mean()

    train = pj.make_train_step(loss_fn, optax.sgd(0.05), mesh=pj.data_mesh(2))
    like = train.abstract_state(np.zeros((4, 4), np.float32))
    with checkpoint.manager(tmp_path / "saved") as manager:
        found = checkpoint.restore(manager, train, like)
        assert [int(found.state.step)] == manager.all_steps()[-1:]
    assert int(found.state.step) in (8, 10)

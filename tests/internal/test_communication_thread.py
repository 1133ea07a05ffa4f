"""Tests the jobs of the communication thread: their order, errors and end."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import pytest

from pipejax._core.executors import Fused
from pipejax._core.executors._host import Host
from pipejax._internal import communication_thread
from pipejax._internal.communication_thread import CommunicationThread, _leave

from ..core.executors.digits import Appending, batch_of, config_of, start
from ..helpers import wrap_exchange


def test_thread_runs_jobs_in_order():
    """Earlier jobs finish first, although they take longer."""
    owner, done = CommunicationThread(), []

    def job(number):
        time.sleep(0.002 * (5 - number))
        done.append((number, threading.current_thread().name))
        return 10 * number

    futures = [owner.submit(job, number) for number in range(5)]
    assert [future.result() for future in futures] == [0, 10, 20, 30, 40]
    assert done == [(number, "pipejax-communication") for number in range(5)]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_error_of_a_job_is_raised_and_the_next_job_runs(kind):
    owner = CommunicationThread()

    def fail():
        raise kind("no route to host")

    failing, following = owner.submit(fail), owner.submit(int, "7")
    with pytest.raises(kind, match="no route to host"):
        failing.result()
    assert following.result() == 7


def test_join_waits_for_all_jobs():
    owner, gate, done = CommunicationThread(), threading.Event(), []
    owner.submit(gate.wait)
    owner.submit(done.append, 1)
    threading.Timer(0.05, gate.set).start()
    owner.join()
    assert done == [1]


def test_no_thread_is_started_without_a_job():
    owner = CommunicationThread()
    owner.join()
    assert owner._thread is None


def test_waiting_thread_keeps_no_job_alive():
    class Gradients:
        pass

    owner, gradients = CommunicationThread(), Gradients()
    alive = weakref.ref(gradients)
    owner.submit(id, gradients).result()
    owner.join()
    del gradients
    gc.collect()
    assert alive() is None


def of(name, order):
    """Returns a host executor that appends its name to `order` when it reduces."""
    host = Host(config_of(Appending()), "asked for")

    def recorded(exchange, *args):
        order.append(name)
        return exchange(*args)

    wrap_exchange(host, recorded)
    return host


@pytest.mark.one_python
def test_all_train_steps_share_the_thread():
    """Reductions run as they were submitted, also those of a step that was dropped."""
    order = []
    first, second = of("first", order), of("second", order)
    batch, config = batch_of(1), first.config
    state, *_ = first.step(start(config), batch)
    second.step(start(config), batch)
    communication_thread.join()
    hold = threading.Event()
    communication_thread.submit(hold.wait)
    threading.Timer(0.2, hold.set).start()
    first.step(state, batch)
    second.step(start(config), batch)
    del first
    gc.collect()
    communication_thread.join()
    assert order == [*2 * ["first"], *2 * ["second"], "first", *2 * ["second"]]


def test_error_is_raised_only_in_its_own_train_step():
    broken, sound = of("broken", []), of("sound", order := [])

    def fail(*args):
        raise ValueError("no route to host")

    wrap_exchange(broken, fail)
    config, batch = sound.config, batch_of(1)
    with pytest.raises(ValueError, match="no route to host"):
        broken.step(start(config), batch)
    state, *_ = sound.step(start(config), batch)
    sound.drain(state)
    communication_thread.join()
    assert order == 2 * ["sound"]


def test_fused_step_waits_for_its_turn_on_the_thread(monkeypatch):
    """It starts after what was submitted before, and later work waits until it ends."""
    where = "pipejax._core.executors._turns.spans_cpu_processes"
    monkeypatch.setattr(where, lambda mesh: True)
    order, config = [], config_of(Appending())
    fused = Fused(config, "asked for")
    programs = fused._programs[True]

    def launched(*args):
        order.append("launched")
        return programs(*args)

    fused.__dict__["_programs"] = {True: launched}
    communication_thread.submit(time.sleep, 0.2)
    communication_thread.submit(order.append, "before")
    _, info, _ = fused.step(start(config), batch_of(1))
    communication_thread.submit(lambda: order.append(info.is_ready()))
    communication_thread.join()
    assert order == ["before", "launched", True]


@pytest.mark.parametrize(
    ("last", "seconds"), [(None, "GRACE"), (KeyboardInterrupt(), "HURRY")]
)
def test_program_leaves_without_an_endless_job(monkeypatch, caplog, last, seconds):
    where = {
        "GRACE": "_internal.communication_thread.GRACE",
        "HURRY": "_internal.leaving.HURRY",
    }[seconds]
    monkeypatch.setattr(f"pipejax.{where}", 0.05)
    monkeypatch.setattr(sys, "last_value", last, raising=False)
    owner, gate, left = CommunicationThread(), threading.Event(), []
    owner.submit(gate.wait)
    _leave(owner._thread, owner._work, lambda: left.append(True))
    gate.set()
    assert left == [True]
    assert "still waits for other processes 0.05 s after" in caplog.text


def test_program_waits_for_a_job_before_leaving():
    owner, done, left = CommunicationThread(), [], []
    owner.submit(time.sleep, 0.05)
    owner.submit(done.append, 1)
    _leave(owner._thread, owner._work, lambda: left.append(True))
    assert (done, left) == ([1], [])


FORKS = """
import os, sys
from pipejax._internal.communication_thread import CommunicationThread
owner = CommunicationThread()
owner.join()
assert owner.submit(int, "7").result() == 7
child = os.fork()
if child == 0:
    try:
        owner.submit(int, "8")
    except RuntimeError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_submit_in_a_forked_process_is_refused():
    """Its work would wait forever for a thread that is not there."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7


def test_jobs_have_the_precision_of_the_caller():
    owner = CommunicationThread()

    def dtype():
        return str(jnp.arange(1.0).dtype)

    for x64, wanted in ((True, "float64"), (False, "float32")):
        with jax.enable_x64(x64):
            assert owner.submit(dtype).result() == wanted

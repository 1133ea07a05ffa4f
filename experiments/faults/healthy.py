"""Counts false alarms: healthy jobs on a machine that is under load.

Bar: no watchdog ends any of a thousand healthy jobs, although it takes a process for
dead 0.7 seconds after its connection has closed, and for silent two seconds after its
last report, or five times the longest delay of its reports.

A job has three processes, which take short steps, with a collective in every tenth.
Beside the jobs, processes keep all cores busy.

Command: python -m experiments.faults.healthy
         If it is interrupted, start it again: it goes on after the jobs that have run.
Time: about two hours on 2 cores.
Result: experiments/results/faults_healthy.json
"""

import dataclasses
import json
import multiprocessing
import os
import pathlib
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import multihost_utils

import pipejax as pj
from experiments import report

PROCESSES = 3


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the jobs."""

    jobs: int = 1000
    """The number of jobs."""
    steps: int = 150
    """The number of steps of a job."""
    pace: float = 0.02
    """Seconds that each step waits."""
    load: int = 4
    """The number of processes that compute beside the jobs."""
    limit: float = 10.0
    """The limit of the watchdogs in seconds."""
    out: pathlib.Path = report.RESULTS / "faults_healthy.json"
    """The file that the result is written to."""


def main(config: Config) -> dict[str, Any]:
    """Runs all jobs, and saves the result after each of them."""
    # Every process of a job is a fork of one that has imported everything.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipejax", "experiments.report"])
    busy = [context.Process(target=_compute, daemon=True) for _ in range(config.load)]
    for each in busy:
        each.start()
    found: dict[str, Any] = {"jobs": 0, "ended": 0}
    if config.out.exists():
        found = json.loads(config.out.read_text())["found"]
    ended, seconds = found["ended"], []
    try:
        for number in range(found["jobs"], config.jobs):
            begun = time.monotonic()
            ended += any(run(context, config))
            seconds.append(time.monotonic() - begun)
            found = {
                "jobs": number + 1,
                "ended": ended,
                "median_s": round(float(np.median(seconds)), 2),
                # Of the last minute, with everything else that runs on the machine.
                "most_load": max(
                    found.get("most_load", 0.0), round(os.getloadavg()[0], 1)
                ),
            }
            report.save(config.out, seed=0, **report.settings(config), found=found)
    finally:
        for each in busy:
            each.kill()
    sys.stdout.write(f"{found}\n")
    return found


def run(context: Any, config: Config) -> Sequence[int]:
    """Runs a job, and returns the exit codes of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = [
        context.Process(target=_train, args=(config, address, rank))
        for rank in range(PROCESSES)
    ]
    for each in job:
        each.start()
    for each in job:
        each.join()
    return [each.exitcode for each in job]


def _train(config: Config, address: str, rank: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    pj.launch.initialize(address, PROCESSES, rank)
    with pj.launch.Watchdog(config.limit) as watchdog:
        for number in range(config.steps):
            watchdog.step(number)
            time.sleep(config.pace)
            if number % 10 == 0:
                multihost_utils.process_allgather(jnp.ones(3))
    # A process of `multiprocessing` calls nothing at its exit.
    jax.distributed.shutdown()


def _compute() -> None:
    values = np.ones((200, 200))
    # It must not stay if this program is killed.
    while (parent := multiprocessing.parent_process()) and parent.is_alive():
        values = np.tanh(values @ values)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

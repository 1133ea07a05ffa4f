"""Takes steps together with other processes, and provokes a fault."""

import ctypes
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from pipejax import launch

LIMIT = 10.0
STEPS = 12
FAULTY = 5
"""The step at which the fault happens."""


def lost():
    """Stands still where a stack should show it."""
    time.sleep(600)


def provoke(fault, watchdog):
    """Provokes the fault of this name."""
    if fault == "killed":
        time.sleep(3)  # process 0 has then seen it alive
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise KeyError("label")
    if fault == "lost":
        lost()
    if fault == "holds the interpreter":
        # Unlike `CDLL`, `PyDLL` keeps the interpreter locked.
        ctypes.PyDLL(None).sleep(600)
    if fault == "slow":
        with watchdog.pause("an evaluation"):
            time.sleep(1.5 * LIMIT)


def main(rank, processes, port, faulty, fault):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    launch.initialize(f"127.0.0.1:{port}", processes, rank, timeout=120)
    with launch.Watchdog(LIMIT) as watchdog:
        for number in range(STEPS):
            watchdog.step(number)
            if number == FAULTY and rank == faulty:
                provoke(fault, watchdog)
            multihost_utils.process_allgather(jnp.ones(3))
            time.sleep(0.1)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5])

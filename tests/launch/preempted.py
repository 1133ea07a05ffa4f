"""One of several processes that end when one of them is told to."""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from pipejax import launch


def main(folder):
    launch.initialize(timeout=120)
    rank = jax.process_index()
    with launch.Watchdog(limit=30.0) as watchdog:
        for number in range(10_000):
            watchdog.step(number)
            multihost_utils.process_allgather(jnp.ones(3))
            time.sleep(0.02 * (1 + rank))  # not all are at one step when it comes
            (folder / f"running{rank}").touch()
            if multihost_utils.reached_preemption_sync_point(number):
                (folder / f"saved{rank}").write_text(str(number))
                sys.exit()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

"""Trains as one of several processes, and saves and ends when one is told to end."""

import os
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import pipejax as pj
from pipejax import checkpoint, collectives

from ..helpers import batches, init_params, loss_fn

STEPS = 60


def made(devices):
    return pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(devices),
        all_reduce=collectives.two_shot(),
    )


def digest(params):
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params)).hex()


def main(folder):
    pj.launch.initialize(timeout=120)
    rank, processes = jax.process_index(), jax.process_count()
    train = made(processes)
    state = train.init(init_params())
    with (
        pj.launch.Watchdog(limit=30.0) as watchdog,
        checkpoint.manager(folder / "checkpoints") as manager,
    ):
        if manager.latest_step() is not None:
            state = checkpoint.restore(manager, train, state).state
        begun = int(state.step)
        for number, batch in [*enumerate(batches(STEPS, size=12))][begun:]:
            watchdog.step(number)
            if multihost_utils.reached_preemption_sync_point(number):
                checkpoint.save(manager, state)
                sys.exit()
            mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
            state, _ = train.step(state, train.batch(mine))
            if not begun:
                # The processes are at different steps when the signal arrives.
                time.sleep(0.05 * (1 + rank))
            if number == 3:
                (folder / f"running{rank}").write_text(str(os.getpid()))
        params = train.drain(state)[0].params
    (folder / f"ended{rank}").write_text(f"{begun} {digest(params)}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

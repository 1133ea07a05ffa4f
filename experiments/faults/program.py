"""Runs on every host: trains on digits, with checkpoints, a watchdog and faults.

Each fault happens once, and a file notes that it has happened. Each process ends with a
line that has the digest of its parameters. It may also print a diary during the run.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
import tyro

import pipejax as pj
from experiments import data, learning
from pipejax import checkpoint, codecs, collectives
from pipejax._internal import timeline

from . import provoke

BATCH = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the run."""

    folder: pathlib.Path
    """The folder of the checkpoints, which all hosts share."""
    steps: int = 40
    """The number of steps of the whole run."""
    every: int = 5
    """The number of steps from one checkpoint to the next."""
    limit: float = 10.0
    """The limit of the watchdog in seconds."""
    rate: str = "200mbit"
    """The rate of the link, to which a slow link returns."""
    faults: tuple[provoke.Fault, ...] = ()
    """The faults: the kind, the rank of the process, and the step of each."""
    pace: float = 0.0
    """Seconds that each step waits, in place of the compute of a larger model."""
    seed: int = 0
    """The seed of parameters and batches."""
    diary: int = 0
    """The number of steps from one entry of the diary to the next; 0 for no diary."""
    cache: pathlib.Path | None = None
    """The folder of the compilation cache, which all hosts share."""
    memory: pathlib.Path | None = None
    """The folder for snapshots, of each host its own; `None` for none."""


def main(config: Config) -> None:
    """Trains to the end, from the last checkpoint if there is one."""
    if config.cache:
        jax.config.update("jax_compilation_cache_dir", str(config.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    first = os.environ.get("RANK", "0") == "0"
    if first and "disk full" in [kind for kind, _, _ in config.faults]:
        provoke.small_disk(config.folder)
    # A process that stands by does this before it waits.
    dataset = data.load("digits")
    pj.launch.initialize(timeout=90.0, config=dataclasses.asdict(config))
    if first:  # after a fault, and not when a process begins to stand by
        provoke.make_room(config.folder)
    sys.stdout.write(f"joined {timeline.now():.1f}\n")
    rank = jax.process_index()
    task = learning.classifier("mlp", dataset, batch_size=BATCH, steps=config.steps)
    train = pj.make_train_step(
        task.loss,
        optax.sgd(0.05, momentum=0.9),
        mesh=pj.data_mesh(),
        all_reduce=collectives.two_shot(codecs.error_feedback(codecs.int8())),
    )
    batches = data.train_batches(
        dataset,
        batch_size=BATCH,
        seed=config.seed,
        process_index=rank,
        process_count=jax.process_count(),
    )
    state = train.init(task.init(config.seed))
    with (
        pj.launch.Watchdog(config.limit) as watchdog,
        checkpoint.manager(
            config.folder / "checkpoints", memory=config.memory
        ) as manager,
    ):
        if manager.latest_step() is not None:
            restored = checkpoint.restore(manager, train, state)
            state = restored.state
            batches.set_state(restored.extras["batches"])
        for number in range(int(state.step), config.steps):
            watchdog.step(number)
            for fault in config.faults:
                if fault[1:] == (rank, number):
                    noted = functools.partial(timeline.note, "provoked", kind=fault[0])
                    provoke.once(fault, config.folder, config.rate, noted)
            time.sleep(config.pace)
            state, info = train.step(state, train.batch(next(batches)))
            jax.block_until_ready(info)
            if config.memory:
                extras = {"batches": batches.get_state()}
                checkpoint.snapshot(manager, state, extras)
            if (number + 1) % config.every == 0:
                train.join()  # because Orbax has collectives of its own
                checkpoint.save(manager, state, {"batches": batches.get_state()})
            if config.diary and (number + 1) % config.diary == 0:
                sys.stdout.write(f"{json.dumps(entry(number + 1, state.params))}\n")
        params = train.drain(state)[0].params
    sys.stdout.write(f"digest {digest(params)}\n")


def entry(step: int, params: Any) -> dict[str, Any]:
    """Returns an entry of the diary: memory in MiB, threads, arrays, and the digest."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return {
        "step": step,
        "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(list(pathlib.Path("/proc/self/task").iterdir())),
        "arrays": len(jax.live_arrays()),
        "digest": digest(params),
    }


def digest(params: Any) -> str:
    """Returns a digest of all bits of the parameters."""
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

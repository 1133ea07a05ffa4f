"""Trains with snapshots on one of the hosts, and restores states from them."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro

import pipejax as pj
from experiments.cluster import member
from pipejax import checkpoint
from pipejax._internal import fault_rate, timeline
from pipejax.launch._goodput import events

LAYERS = 12
MEMORY = pathlib.Path("/dev/shm")
FAULTS_PER_HOUR = 125.0  # with fewer, there are few snapshots in a run


class BrokenOffError(Exception):
    """Stands for a fault, after which the memory stays."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run."""

    width: int
    """The width of the square layers."""
    pace: float = 0.5
    """Seconds that each step waits."""
    steps: int = 240
    """The number of steps with snapshots."""
    out: pathlib.Path | None = None
    """File to which the first host writes its figures. By default, it prints them."""


def main(config: Config) -> None:
    """Measures, and writes the figures of the first host."""
    os.environ[fault_rate.VARIABLE] = str(FAULTS_PER_HOUR)
    rank = member.join()
    train = pj.make_train_step(
        _loss, optax.adamw(1e-3), mesh=pj.data_mesh(), donate=True
    )
    shape = jax.ShapeDtypeStruct((config.width, config.width), jnp.float32)
    like = train.abstract_state([shape] * LAYERS)
    # Every host sees this folder.
    shared = config.out.parent if config.out else pathlib.Path(tempfile.mkdtemp())
    folder = shared / "checkpoints"
    figures = trained(config, train, folder)
    figures["own"] = restored(train, like, folder)
    if rank == 1:
        emptied()
    member.barrier()
    figures["other"] = restored(train, like, folder)
    emptied()
    member.barrier()
    figures["disk"] = restored(train, like, folder)
    if rank == 0:
        member.answer(figures, config.out)
    member.barrier()


def trained(
    config: Config, train: pj.TrainStep, folder: pathlib.Path
) -> dict[str, Any]:
    """Trains with snapshots and a checkpoint, and is broken off."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    size = (config.width, config.width)
    state = train.init([jax.random.normal(key, size) for key in keys])
    batch = train.batch(np.ones((8, config.width), np.float32))
    state, _ = train.step(state, batch)
    nbytes = sum(
        sum(shard.data.nbytes for shard in leaf.addressable_shards)
        for leaf in jax.tree.leaves(state._replace(calls=None))
    )
    with noted() as notes, broken_off(folder) as manager:
        checkpoint.save(manager, state)
        manager.wait_until_finished()
        begun, copied = time.monotonic(), []
        for number in range(config.steps):
            time.sleep(config.pace)
            state, info = train.step(state, batch)
            jax.block_until_ready(info)
            if checkpoint.snapshot(manager, state):
                copied.append(number)
        total = time.monotonic() - begun
        manager.keeper.settle()
        outcomes = manager.keeper.outcomes
    # The first, a checkpoint, and the next two, into new memory, take longer.
    stops = [each["seconds"] for each in notes() if each["what"] == "saved"][3:]
    used = sum(path.stat().st_blocks * 512 for path in MEMORY.glob("*/*"))
    figures = {
        "bytes": nbytes,
        "stop": statistics.median(stops),
        "copy": _copy(nbytes),
        "beside": max((each.beside for each in outcomes), default=0.0),
        "steps_between": copied[-1] - copied[-2],
        "snapshots": len(copied),
        "share": statistics.median(stops) * len(copied) / total,
        "memory": used,
    }
    jax.tree.map(lambda leaf: leaf.delete(), state._replace(calls=None))
    return figures


def restored(train: pj.TrainStep, like: Any, folder: pathlib.Path) -> float:
    """Returns the seconds from opening the manager until the state is there."""
    member.barrier()
    begun = time.monotonic()
    with broken_off(folder) as manager:
        state = checkpoint.restore(manager, train, like).state
        jax.block_until_ready(state)
        seconds = time.monotonic() - begun
    jax.tree.map(lambda leaf: leaf.delete(), state._replace(calls=None))
    return seconds


def emptied() -> None:
    """Empties the memory of this host."""
    for path in MEMORY.iterdir():
        shutil.rmtree(path)


@contextlib.contextmanager
def broken_off(folder: pathlib.Path) -> Iterator[ocp.CheckpointManager]:
    """Opens a manager, and closes it as after a fault."""
    with (
        contextlib.suppress(BrokenOffError),
        checkpoint.manager(folder, memory=MEMORY) as manager,
    ):
        yield manager
        raise BrokenOffError


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Keeps a timeline, and yields a function that returns its events."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "timeline"
        os.environ[timeline.VARIABLE] = str(path)
        found: list[dict[str, Any]] = []
        yield lambda: found
        found += events(path)
        del os.environ[timeline.VARIABLE]


def _copy(size: int) -> float:
    """Returns the seconds of a copy in memory, the best of three."""
    source = np.ones(size, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(4):
        begun = time.monotonic()
        np.copyto(target, source)
        times.append(time.monotonic() - begun)
    return min(times[1:])


def _loss(params: Any, batch: jax.Array) -> jax.Array:
    for layer in params:
        batch = jnp.tanh(batch @ layer)
    return jnp.mean(batch**2)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

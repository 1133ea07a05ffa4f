"""Tasks of a group of processes, each with a memory of its own, like hosts."""

import pathlib

import jax
import numpy as np
import optax

import pipejax as pj
from pipejax import checkpoint
from pipejax.checkpoint._snapshots import _pace
from pipejax.codecs import error_feedback, int8
from pipejax.collectives import two_shot

from ...helpers import batches, init_params, loss_fn
from .runs import BrokenOffError, broken_off, settled


def trained(folder, until):
    """Trains to a step from the newest state, and is broken off there.

    Returns the step that it began with, and the bits of the parameters.
    """
    _pace.FIRST, _pace.steps_between = 1, lambda *_: 1
    rank, processes = jax.process_index(), jax.process_count()
    memory = pathlib.Path(folder) / f"memory of {rank}"
    memory.mkdir(exist_ok=True)
    train = pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(),
        all_reduce=two_shot(error_feedback(int8(8))),
    )
    state, first = train.init(init_params()), 0
    with broken_off(pathlib.Path(folder) / "run", memory) as manager:
        if manager.latest_step() is not None:
            restored = checkpoint.restore(manager, train, state)
            state, first = restored.state, restored.extras["step"]
            assert restored.extras["rank"].value == rank
        for number in range(first, int(until)):
            batch = batches(number + 1)[number]
            mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
            state, _ = train.step(state, train.batch(mine))
            settled(manager)
            extras = {"step": number + 1, "rank": checkpoint.PerProcess(rank)}
            checkpoint.snapshot(manager, state, extras)
    leaves = [
        np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(state.params)
    ]
    return first, leaves


def rolled_back(folder):
    """Trains, and goes back to the newest snapshot and the one before it.

    Returns the steps to which it came, and how many parameters differ from those there.
    """
    _pace.FIRST, _pace.steps_between = 1, lambda *_: 1
    rank, processes = jax.process_index(), jax.process_count()
    memory = pathlib.Path(folder) / f"memory of {rank}"
    memory.mkdir()
    train = pj.make_train_step(loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh())
    state, kept, found = train.init(init_params()), {}, []
    with checkpoint.manager(pathlib.Path(folder) / "run", memory=memory) as manager:
        for number, batch in enumerate(batches(4), 1):
            mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
            state, _ = train.step(state, train.batch(mine))
            kept[number] = np.asarray(state.params["out"])
            settled(manager)
            checkpoint.snapshot(manager, state, {"step": number})
        for step in (None, 3):
            restored = checkpoint.restore(manager, train, state, step)
            number = restored.extras["step"]
            same = np.asarray(restored.state.params["out"]) == kept[number]
            found.append([number, int((~same).sum())])
    return found


def differing_extras(folder):
    """Returns the newest step that counts if the extras of processes differ."""
    memory = pathlib.Path(folder) / f"memory of {jax.process_index()}"
    memory.mkdir(exist_ok=True)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh())
    state = train.init(init_params())
    with broken_off(pathlib.Path(folder) / "run", memory) as manager:
        checkpoint.snapshot(manager, state, {"rank": jax.process_index()})
    with checkpoint.manager(pathlib.Path(folder) / "run", memory=memory) as manager:
        return manager.latest_step()


def closed(folder, fails):
    """Closes a manager, by an error on process 1 if `fails`; returns what is left."""
    rank = jax.process_index()
    memory = pathlib.Path(folder) / f"memory of {rank}"
    memory.mkdir(exist_ok=True)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh())
    try:
        with checkpoint.manager(pathlib.Path(folder) / "run", memory=memory) as manager:
            checkpoint.snapshot(manager, train.init(init_params()))
            settled(manager)
            if fails == "True" and rank == 1:
                raise BrokenOffError
    except BrokenOffError:
        pass
    return len([*memory.iterdir()])


def failing_copy(folder):
    """Makes a snapshot whose copy cannot be fetched from process 1, and asks again.

    Returns why there are no more snapshots, and the newest step that all can read.
    """
    _pace.FIRST, _pace.steps_between = 1, lambda *_: 1
    rank = jax.process_index()
    memory = pathlib.Path(folder) / f"memory of {rank}"
    memory.mkdir()
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh())
    state = train.init(init_params())
    with broken_off(pathlib.Path(folder) / "run", memory) as manager:
        for number in range(3):
            if number == 1 and rank == 1:
                manager.keeper.memory._server.close()
            batch = jax.tree.map(lambda x: np.split(x, 2)[rank], batches(3)[number])
            state, _ = train.step(state, train.batch(batch))
            checkpoint.snapshot(manager, state)
            settled(manager)
        off = manager.keeper.off
    with checkpoint.manager(pathlib.Path(folder) / "run", memory=memory) as manager:
        return off, manager.latest_step()

"""Trains a sharded model with two groups, in one process or in one for each group."""

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from ...groups import batches, loss_fn, placed

STEPS = 20
SETTINGS = {
    "predicted": {},
    "int8": {
        "width": 3,
        "all_reduce": collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
    },
    "one program": {"executor": "fused"},
}


def make(name, groups=2):
    """Returns a train step for groups of two devices, and parameters on its mesh."""
    mesh = pj.data_mesh(2 * groups, axis_name=("host", "fsdp"), hosts=groups)
    train = pj.make_train_step(
        loss_fn, optax.adamw(1e-2), mesh=mesh, axis_name="host", **SETTINGS[name]
    )
    return train, placed(mesh, "fsdp")


def fed():
    """Gives each process of a single group a part of a batch of its own, or the same.

    Returns the losses and errors of the steps.
    """
    train, params = make("one program", groups=1)
    state, (batch,) = train.init(params), batches(1)
    rank, count = jax.process_index(), jax.process_count()
    mine = jax.tree.map(lambda x: np.split(x, count)[rank], batch)
    parts = {
        "other parts": lambda: train.batch(mine),
        "split inside": lambda: train.batch(mine, axis_name=("host", "fsdp")),
        "same parts": lambda: train.batch(batch),
    }
    found = {}
    for name, part in parts.items():
        try:
            after, _ = train.step(state, part())
            _, (info,) = train.drain(after)
            found[name] = float(info.loss)
        except ValueError as error:
            found[name] = str(error)
    return found


def trained(train, state, steps, first=0):
    """Returns the state after some steps. Each process passes its part of a batch."""
    rank, processes = jax.process_index(), jax.process_count()
    for batch in batches(first + steps)[first:]:
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        given = train.batch(mine, axis_name=("host", "fsdp"))
        state, _ = train.step(state, given)
    return state


def whole(train, tree):
    """Returns whole arrays as hexadecimal digits, by name."""
    train.join()
    every = multihost_utils.process_allgather(tree, tiled=True)
    leaves = jax.tree_util.tree_leaves_with_path(every)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes().hex()
        for path, leaf in leaves
    }


def saved_and_continued(name, folder):
    """Trains, and trains again from a checkpoint of half of the steps.

    Returns the executor, the parameters, and whether both runs end alike.
    """
    train, params = make(name)
    half = trained(train, train.init(params), STEPS // 2)
    train.join()
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, half)
        manager.wait_until_finished()
        again = checkpoint.restore(manager, train, train.abstract_state(params)).state
    ends = [
        whole(train, train.drain(trained(train, state, STEPS // 2, STEPS // 2))[0])
        for state in (half, again)
    ]
    alike = ends[0] == ends[1]
    return {"executor": train.executor.name, "alike": alike, "end": ends[0]}

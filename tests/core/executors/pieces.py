"""Trains with a sharded optimizer, in one process or in several with a device each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from ...helpers import batches
from .sharded import whole

STEPS = 12
FEEDBACK = codecs.error_feedback(codecs.int8(8))
SETTINGS = {
    "plain": {"weight_prediction": False},
    "predicted": {},
    "gathered": {"gather_codec": codecs.int4(8)},
    "int8": {"width": 3, "all_reduce": collectives.two_shot(FEEDBACK)},
}


def params():
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(size=(5, 8)).astype(np.float32) / 2,
        "bias": np.zeros(7, np.float32),  # divides among no devices
        "out": rng.normal(size=(8, 3)).astype(np.float32) / 2,
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"])
    shift = params["bias"][None, :3]
    return jnp.mean((hidden @ params["out"] + shift - batch["y"]) ** 2)


def make(name, devices=None):
    """Returns a train step. Sums in a program of their own have the same bits anywhere.

    XLA may add up the norms of a prediction in another order within one program.
    """
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    mesh = pj.data_mesh(devices)
    return pj.make_train_step(
        loss_fn, tx, mesh=mesh, shard_optimizer=True, executor="host", **SETTINGS[name]
    )


def trained(train, state, steps, first=0):
    """Returns the state after some steps. Each process passes its part of a batch."""
    rank, processes = jax.process_index(), jax.process_count()
    for batch in batches(first + steps)[first:]:
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        state, _ = train.step(state, train.batch(mine))
    return state


def saved_and_continued(name, folder, devices=None):
    """Trains, and trains again from a checkpoint of half of the steps.

    Returns the executor, the parameters, and whether both runs end alike.
    """
    train = make(name, devices)
    half = trained(train, train.init(params()), STEPS // 2)
    train.join()
    with checkpoint.manager(folder) as manager:
        checkpoint.save(manager, half)
        manager.wait_until_finished()
        like = train.abstract_state(params())
        again = checkpoint.restore(manager, train, like).state
    ends = []
    for state in (half, again):
        end = trained(train, state, STEPS // 2, STEPS // 2)
        end, _ = train.drain(end)
        ends.append(whole(train, (end.params, end.opt_state)))
    alike = ends[0] == ends[1]
    return {"executor": train.executor.name, "alike": alike, "end": ends[0]}

"""Trains by local steps, in one process or in several with a device each."""

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import pipejax as pj
from pipejax import checkpoint, codecs, collectives
from pipejax.flax import linen

from ...groups import batches, local_step, params, placed
from .sharded import whole

TX = optax.adamw(1e-2)
SETTINGS = {
    "late": {"sync_every": 3, "overlap_steps": 3, "warmup_steps": 2},
    "at once": {"sync_every": 4, "overlap_steps": 0},
}


def trained(name, folder=None, devices=None, executor="auto"):
    """Returns the executor, the anchor after a drain, and the losses of all rounds.

    With a `folder`, the run goes on from a checkpoint inside a round and an exchange.
    There are two groups. With four devices, those of a group shard the model. Each
    process passes its part of a batch.
    """
    inside = (devices or jax.device_count()) == 4
    names = ("host", "fsdp") if inside else "host"
    mesh = pj.data_mesh(devices, axis_name=names, hosts=2 if inside else None)
    train = local_step(
        mesh,
        outer_tx=optax.sgd(0.7, momentum=0.9),
        all_reduce=collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
        executor=executor,
        **SETTINGS[name],
    )
    rank, processes = jax.process_index(), jax.process_count()
    given = placed(mesh, "fsdp") if inside else params()
    state, losses = train.init(given), []
    for step, batch in enumerate(batches(11)):
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        with jax.transfer_guard("disallow"):  # apart from those that are asked for
            state, info = train.step(state, train.batch(mine, axis_name=names))
        losses.append(info.loss)
        if folder is not None and step == 5:
            train.join()
            with checkpoint.manager(folder) as manager:
                checkpoint.save(manager, state)
                manager.wait_until_finished()
                like = train.abstract_state(given)
                state = checkpoint.restore(manager, train, like).state
    state, reports = train.drain(state)
    losses += [arrival.loss for arrival in reports]
    found = [np.float32(loss).tobytes().hex() for loss in losses]
    anchor = whole(train, state.params)
    return {"executor": train.executor.name, "anchor": anchor, "losses": found}


def written_back(devices=None, executor="auto"):
    """Returns a Linen `TrainState` after local steps, and what tools say of them.

    There are two groups. With four devices, those of a group shard the model.
    """
    inside = (devices or jax.device_count()) == 4
    names = ("host", "fsdp") if inside else "host"
    mesh = pj.data_mesh(devices, axis_name=names, hosts=2 if inside else None)
    train = local_step(
        mesh, tx=TX, sync_every=3, overlap_steps=2, executor=executor, donate=True
    )
    given = placed(mesh, "fsdp") if inside else params()
    before = TrainState.create(apply_fn=None, params=given, tx=TX)
    state, rank = linen.init(train, before), jax.process_index()
    for batch in batches(4):
        mine = jax.tree.map(lambda x: np.split(x, jax.process_count())[rank], batch)
        given = train.batch(mine, axis_name=names)
        state, _ = train.step(state, given)
    sent = [x.bytes for x in train.transfers(state, given) if x.devices == 2]
    measured = pj.overlap.measure(train, state, given, rounds=2, steps=1)
    after = linen.update(before, train.drain(state)[0])
    found = after.params, after.opt_state, after.step
    return {
        "executor": train.executor.name,
        "sent": sum(sent),
        "measured": [len(times) for times in measured],
        "step": int(after.step),
        "state": whole(train, found),
    }

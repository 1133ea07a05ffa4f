"""Trains by local steps, in one process or in several with a device each."""

import jax
import numpy as np
import optax

import pipejax as pj
from pipejax import codecs, collectives

from ...helpers import batches, init_params, loss_fn
from .sharded import whole

SETTINGS = {
    "late": {"sync_every": 3, "overlap_steps": 3},
    "at once": {"sync_every": 4, "overlap_steps": 0},
}


def trained(name, devices=None, executor="auto"):
    """Returns the executor, the anchor after a drain, and the losses of all rounds.

    Each process passes its part of a batch.
    """
    train = pj.make_local_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(devices),
        outer_tx=optax.sgd(0.7, momentum=0.9),
        all_reduce=collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
        executor=executor,
        **SETTINGS[name],
    )
    rank, processes = jax.process_index(), jax.process_count()
    state, losses = train.init(init_params()), []
    for batch in batches(11):
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        state, info = train.step(state, train.batch(mine))
        losses.append(info.loss)
    state, reports = train.drain(state)
    losses += [arrival.loss for arrival in reports]
    found = [np.float32(loss).tobytes().hex() for loss in losses]
    anchor = whole(train, state.params)
    return {"executor": train.executor.name, "anchor": anchor, "losses": found}

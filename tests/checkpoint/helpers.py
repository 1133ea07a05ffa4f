"""Makes train steps whose states use every field, and copies states to the host."""

import functools

import jax
import numpy as np
import optax

import pipejax as pj

from ..helpers import init_params, loss_fn


def noisy_loss(params, batch, *, rng):
    noise = 0.01 * jax.random.normal(rng, batch["y"].shape, batch["y"].dtype)
    return loss_fn(params, batch | {"y": batch["y"] + noise})


ADAMW = optax.adamw(1e-2)


def new_train_step(devices=4, width=2, tx=ADAMW, **options):
    return pj.make_train_step(
        noisy_loss,
        tx,
        mesh=pj.data_mesh(devices),
        width=width,
        donate=True,
        **options,
    )


# Tests share train steps, and with them traced programs.
train_step = functools.cache(new_train_step)


def init(train):
    return train.init(init_params(), rng=jax.random.key(3))


def run(train, state, data):
    for batch in data:
        state, _ = train.step(state, batch)
    return state


def feedback(devices, width=2, make=train_step):
    codec = pj.codecs.error_feedback(pj.codecs.int4(8))
    all_reduce = pj.collectives.scheduled(
        [pj.collectives.psum(), pj.collectives.two_shot(codec)], [2]
    )
    return make(devices, width, all_reduce=all_reduce)


def entries(folder):
    """Returns the sorted names in a folder, without the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def host(state):
    """Copies a state to the host, safe from donation, with PRNG keys as integers."""
    return jax.tree.map(_bits, state)


def _bits(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf, copy=True)

"""Updates of Optax, and the programs that run them on pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipejax.pieces import Devices, on_pieces, whole

DEVICES = Devices({"data": 4})


def arrays(seed):
    """Returns arrays that divide along the first axis, along the second, and not."""
    rng = np.random.default_rng(seed)
    shapes = {"first": (8, 3), "second": (3, 8), "whole": (3,)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def split_of(leaf):
    splits = {(8, 3): (("data",), ()), (3, 8): ((), ("data",))}
    return splits.get(leaf.shape, whole(leaf.ndim))


def planned(tx):
    """Returns an update with its arguments, and the program for pieces of them."""
    params, gradients = arrays(0), arrays(1)
    state = tx.init(params)
    for seed in (2, 3):  # moments that are not zero
        _, state = tx.update(arrays(seed), state, params)

    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    args = jax.tree.map(jnp.asarray, (gradients, state, params))
    splits = list(map(split_of, jax.tree.leaves(args)))
    return update, args, splits, on_pieces(update, args, splits, DEVICES)

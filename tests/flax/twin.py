"""
Implements Pipe-SGD with model state and keys by hand, for any model of one device.

This file imports nothing of pipejax. See `tests/reference.py` for the recursion alone.
"""

import jax
import numpy as np
import optax

from ..reference import mean, split


def pipe_sgd(loss_fn, tx, params, model_state, key, batches, *, devices, width):
    """
    Trains with weight prediction, drains, and returns parameters and model state.

    Args:
      loss_fn: `loss_fn(params, model_state, batch, key) -> (loss, model_state)` of one
        device on its share. Each device and step has its own `key`.
      tx: An Optax transformation.
      params: A pytree of float32 arrays.
      model_state: A pytree of arrays.
      key: The key of the run.
      batches: One global batch for each step.
      devices: The number of devices that share a batch.
      width: The pipeline width K.
    """

    @jax.jit
    def message(params, model_state, batch, key):
        grad = jax.grad(loss_fn, has_aux=True)
        gradients, after = grad(params, model_state, batch, key)
        return gradients, jax.tree.map(lambda a, b: a - b, after, model_state)

    @jax.jit
    def apply(state, message):
        (params, opt_state, model_state), (gradients, changes) = state, message
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, jax.tree.map(lambda a, b: a + b, model_state, changes)

    state, in_flight = (params, tx.init(params), model_state), []
    for batch in batches:
        key, of_step = jax.random.split(key)
        fresh = []
        for device, share in enumerate(split(batch, devices)):
            at = state
            for messages in in_flight:
                at = apply(at, messages[device])
            own = jax.random.fold_in(of_step, device)
            fresh.append(jax.tree.map(np.asarray, message(at[0], at[2], share, own)))
        in_flight.append(fresh)
        if len(in_flight) == width:
            state = apply(state, mean(in_flight.pop(0)))
    for messages in in_flight:
        state = apply(state, mean(messages))
    return state[0], state[2]

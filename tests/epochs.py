"""
Implements epochs of width 2 with weight prediction by hand. Each epoch ends drained.

Worker i takes its gradient at the parameters to which it expects the mean in flight to
lead: by the mean that was applied last, and to first order by its own gradient (see
`reference.linearized`); before any mean is applied, by its own gradient alone. The
update u takes the mean g over workers: `w[t+1] = w[t] - u(g[t-1])`.
"""

import jax
import numpy as np
import optax

from .reference import linearized, mean


def by_hand(loss_fn, tx, params, epochs):
    """
    Yields the parameters after each epoch, and the mean loss of each of its batches.

    Args:
      loss_fn: The loss of one worker on its share of a batch.
      tx: An Optax transformation.
      params: A pytree of float32 arrays.
      epochs: The epochs, each a list of batches. A batch is a list of workers' shares.
    """

    @jax.jit
    def update(g, opt_state, w):
        u, opt_state = tx.update(g, opt_state, w)
        return optax.apply_updates(w, u), opt_state

    grad = jax.jit(jax.value_and_grad(loss_fn))

    def held(m):
        """Returns the optimizer, which has no sums over arrays."""
        del m
        return tx

    def prediction(g):
        if last is None:
            return update(g, opt_state, w)[0]
        return linearized(held, w, opt_state, last, [g])

    w, opt_state, last = params, tx.init(params), None
    for batches in epochs:
        losses, in_flight = [], []
        for shares in batches:
            ahead = [prediction(g) for g in in_flight] or [w] * len(shares)
            found = [grad(*each) for each in zip(ahead, shares, strict=True)]
            if in_flight:
                last = mean(in_flight)
                w, opt_state = update(last, opt_state, w)
            losses.append(np.mean([loss for loss, _ in found]))
            in_flight = [g for _, g in found]
        last = mean(in_flight)
        w, opt_state = update(last, opt_state, w)
        yield w, losses

"""
Implements Pipe-SGD as the paper writes it, on one device and without pipejax.

`w[t] = w[t-1] - u(g[t-K])` for t = 1, 2, ..., where `g[t] = 1/p sum_i grad f_i(w[t])`
and u is an Optax update. The sum over workers is taken in rank order.
"""

import functools

import jax
import numpy as np
import optax


def split(batch, parts):
    """Returns the contiguous shares of a global batch."""
    return [
        jax.tree.map(lambda x, i=i: np.split(np.asarray(x), parts)[i], batch)
        for i in range(parts)
    ]


def mean(trees):
    """Returns the mean over workers, summed in rank order."""
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), trees)
    return jax.tree.map(lambda x: x / np.float32(len(trees)), total)


@functools.cache
def _compiled(loss_fn, tx):
    def update(g, opt_state, w):
        u, opt_state = tx.update(g, opt_state, w)
        return optax.apply_updates(w, u), opt_state

    return jax.jit(jax.grad(loss_fn)), jax.jit(update)


def pipe_sgd(
    loss_fn,
    tx,
    params,
    batches,
    *,
    workers,
    width,
    warmup_steps=0,
    drain,
    predict=False,
    feedback=0.0,
):
    """
    Returns the parameters after every step, and after the drain if there is one.

    Args:
      loss_fn: The loss of one worker on its share of a batch.
      tx: An Optax transformation.
      params: A pytree of float32 arrays.
      batches: One global batch for each step.
      workers: The number of workers p.
      width: The width K.
      warmup_steps: The number of D-Sync steps before the pipeline starts.
      drain: Whether to apply the gradients in flight at the end.
      predict: Whether each worker takes its gradient at the parameters to which its own
        gradients in flight would lead.
      feedback: The factor by which a worker's deviation from the last applied mean is
        added to its oldest gradient in flight.

    Returns:
      A list of parameter pytrees.
    """
    grad, update = _compiled(loss_fn, tx)
    opt_state = tx.init(params)
    w, history, in_flight = params, [], []
    deviations = None
    for t, batch in enumerate(batches):
        fresh = []
        for i, share in enumerate(split(batch, workers)):
            at, state = w, opt_state
            for age, each in enumerate(in_flight if predict else []):
                own = each[i]
                if deviations and not age:
                    own = jax.tree.map(
                        lambda g, e: g + np.float32(feedback) * e, own, deviations[i]
                    )
                at, state = update(own, state, at)
            fresh.append(jax.tree.map(np.asarray, grad(at, share)))
        in_flight.append(fresh)
        if t < warmup_steps or len(in_flight) == width:
            due = in_flight.pop(0)
            w, opt_state = update(mean(due), opt_state, w)
            if t >= warmup_steps:
                deviations = [
                    jax.tree.map(lambda g, m: g - m, own, mean(due)) for own in due
                ]
        history.append(w)
    if drain:
        for each in in_flight:
            w, opt_state = update(mean(each), opt_state, w)
        history.append(w)
    return history

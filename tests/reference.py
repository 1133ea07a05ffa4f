"""
Implements Pipe-SGD as the paper writes it, on one device and without pipejax.

`w[t] = w[t-1] - u(g[t-K])` for t = 1, 2, ..., where `g[t] = 1/p sum_i grad f_i(w[t])`
and u is an Optax update. The sum over workers is taken in rank order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree


def split(batch, parts):
    """Returns the contiguous shares of a global batch."""
    return [
        jax.tree.map(lambda x, i=i: np.split(np.asarray(x), parts)[i], batch)
        for i in range(parts)
    ]


def mean(trees, weights=None):
    """Returns the mean over workers, weighted or not, summed in rank order."""
    if weights is not None:
        trees = [
            jax.tree.map(lambda x, w=w: x * w, tree)
            for tree, w in zip(trees, weights, strict=True)
        ]
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), trees)
    parts = len(trees) if weights is None else sum(weights)
    return jax.tree.map(lambda x: x / np.float32(parts), total)


@functools.cache
def _compiled(loss_fn, tx):
    def update(g, opt_state, w):
        u, opt_state = tx.update(g, opt_state, w)
        return optax.apply_updates(w, u), opt_state

    return jax.jit(jax.grad(loss_fn)), jax.jit(update)


def linearized(held, w, opt_state, m, own):
    """Returns `w + U(m; s) + P (own - m)`, for each of several gradients in flight.

    U is the change by one update after another, and P the diagonal of its Jacobian. No
    element of P is above ten times the length of U over that of m, array by array.
    """
    return _linearized(held, len(own))(w, opt_state, m, own)


@functools.cache
def _linearized(held, count):
    def change(tx, w, opt_state, gradients):
        at, total = w, jax.tree.map(jnp.zeros_like, w)
        for g in gradients:
            u, opt_state = tx.update(g, opt_state, at)
            at, total = optax.apply_updates(at, u), jax.tree.map(jnp.add, total, u)
        return total

    @jax.jit
    def run(w, opt_state, m, own):
        tx, (flat, tree) = held(m), ravel_pytree(m)

        def of_vectors(*vectors):
            return ravel_pytree(change(tx, w, opt_state, map(tree, vectors)))[0]

        total = v = tree(of_vectors(*[flat] * count))
        for place, gradient in enumerate(own):
            jacobian = jax.jacfwd(of_vectors, place)(*[flat] * count)

            def moved(v, p, g, a, u):
                most = 10 * jnp.linalg.norm(u) / jnp.linalg.norm(a)
                return v + jnp.clip(p, -most, most) * (g - a)

            slope = tree(jnp.diag(jacobian))
            v = jax.tree.map(moved, v, slope, gradient, m, total)
        return jax.tree.map(jnp.add, w, v)

    return run


def zeros(tree):
    return jax.tree.map(np.zeros_like, tree)


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
    predict=None,
    held=None,
    weights=None,
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
      predict: Where each worker takes its gradient. `None`: at the parameters. "own":
        at those to which its own gradients in flight would lead. "linearized": at those
        to which the mean that was applied last would lead, with the own gradients to
        first order (see `linearized`).
      held: For "linearized", the optimizer as a function of the mean at which it is
        expanded; the norms of a clip are those of this mean.
      weights: The weight of each worker in each step, or `None` for equal ones. A
        worker without any has no gradient of its own: "own" leaves its update out, and
        "linearized" takes zeros.

    Returns:
      A list of parameter pytrees.
    """
    grad, update = _compiled(loss_fn, tx)
    opt_state = tx.init(params)
    w, history, in_flight, sent = params, [], [], []
    last = None
    for t, batch in enumerate(batches):
        fresh = []
        for i, share in enumerate(split(batch, workers)):
            at, state = w, opt_state
            own_in_flight = [
                each[i] if own_weights is None or own_weights[i] else None
                for each, own_weights in zip(in_flight, sent, strict=True)
            ]
            if predict == "linearized" and last is not None and in_flight:
                known = [zeros(w) if own is None else own for own in own_in_flight]
                at, own_in_flight = linearized(held, w, opt_state, last, known), []
            for own in own_in_flight if predict else []:
                if own is not None:
                    at, state = update(own, state, at)
            fresh.append(jax.tree.map(np.asarray, grad(at, share)))
        in_flight.append(fresh)
        sent.append(None if weights is None else weights[t])
        if t < warmup_steps or len(in_flight) == width:
            last = mean(in_flight.pop(0), sent.pop(0))
            w, opt_state = update(last, opt_state, w)
        history.append(w)
    if drain:
        for each, own_weights in zip(in_flight, sent, strict=True):
            w, opt_state = update(mean(each, own_weights), opt_state, w)
        history.append(w)
    return history

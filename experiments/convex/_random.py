"""Compares a random delay, as of an asynchronous parameter server, with a fixed delay.

Each of p workers takes a gradient at the parameters that the server last sent to it.
Chance decides whose gradient arrives next. On average, a gradient is then p - 1 updates
old, as in a pipeline of width p. However, many gradients are 0 updates old, and some
are 5 p updates old.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pipejax import problems

from ._run import epochs, left, path


def asynchronous(
    problem: problems.Problem,
    tx: optax.GradientTransformation,
    workers: int,
    batches: Any,
    seed: int,
) -> np.ndarray:
    """Returns the parameters before each update of an asynchronous server, [T, d]."""
    steps = jax.tree.leaves(batches)[0].shape[0]
    order = np.random.default_rng(seed).integers(workers, size=steps)
    start = jnp.zeros(problem.optimum.shape, jnp.float32)

    @jax.jit
    def run(batches: Any, order: Any) -> Any:
        def step(carry: Any, arriving: Any) -> Any:
            w, held, opt_state = carry
            batch, who = arriving
            gradient = jax.grad(problem.loss_fn)(held[who], batch)
            updates, opt_state = tx.update(gradient, opt_state, w)
            after = optax.apply_updates(w, updates)
            return (after, held.at[who].set(after), opt_state), w

        held = jnp.tile(start, (workers, 1))
        return lax.scan(step, (start, held, tx.init(start)), (batches, order))[1]

    return np.asarray(run(batches, jnp.asarray(order)))


def by_rate(
    problem: problems.Problem,
    widths: tuple[int, ...],
    rates: tuple[float, ...],
    steps: int,
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    """Returns the mean excess over the last tenth of the steps, by learning rate.

    For each width, there is a row for a fixed delay and a row for a random delay of the
    same mean.
    """
    rows: dict[str, Any] = {}
    for width in widths:
        fixed, drawn = [], []
        for rate in rates:
            tx, ends = optax.sgd(rate), []
            for seed in seeds:
                batches = epochs(problem, steps, 8, seed)
                runs = (
                    path(problem, tx, width, batches),
                    asynchronous(problem, tx, width, batches, seed),
                )
                ends.append([left(problem, run) for run in runs])
            of_fixed, of_drawn = np.mean(ends, axis=0).tolist()
            fixed.append(of_fixed)
            drawn.append(of_drawn)
        rows |= {f"fixed, {width}": fixed, f"random, {width}": drawn}
    return rows

"""Runs the real train step, and observes every step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import pipejax as pj
from pipejax import problems

Loss = Callable[[Any, Any], jax.Array]


def observed(
    loss_fn: Loss,
    tx: optax.GradientTransformation,
    width: int,
    start: Any,
    batches: Any,
    look: Loss,
    **settings: Any,
) -> np.ndarray:
    """Runs a plain delay, and returns `look(w, batch)` before each step.

    Args:
      loss_fn: The loss of parameters and a batch.
      tx: The optimizer.
      width: The width K.
      start: The parameters at the start.
      batches: A pytree of [T, B, ...], a batch for each step.
      look: A function of the parameters and the batch of the next step.
      **settings: Other arguments of `pj.make_train_step`. By default, the mesh has one
        device.

    Returns:
      The values of `look`, [T, ...].
    """
    settings = {"mesh": pj.data_mesh(1)} | settings
    train = pj.make_train_step(
        loss_fn,
        tx,
        width=width,
        weight_prediction=False,
        executor="fused",
        **settings,
    )

    @jax.jit
    def run(state: Any, batches: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            return train.step(state, batch)[0], look(state.params, batch)

        return lax.scan(step, state, batches)[1]

    return np.asarray(run(train.init(jnp.asarray(start, jnp.float32)), batches))


def path(
    problem: problems.Problem,
    tx: optax.GradientTransformation,
    width: int,
    batches: Any,
    **settings: Any,
) -> np.ndarray:
    """Returns the parameters before each step of a run from 0, [T, ...]."""
    start = np.zeros(problem.optimum.shape)
    args = problem.loss_fn, tx, width, start, batches
    return observed(*args, look=lambda w, _: w, **settings)


def left(problem: problems.Problem, path: np.ndarray) -> float:
    """Returns the mean excess over every 20th step of the last tenth of a path."""
    return float(np.mean([problem.excess(w) for w in path[-len(path) // 10 :: 20]]))


def epochs(problem: problems.Problem, steps: int, size: int, seed: int) -> Any:
    """Returns batches [steps, size, ...], with a new random order in each epoch."""
    rng = np.random.default_rng(seed)
    each = -(-steps * size // problem.size)
    order = np.concatenate([rng.permutation(problem.size) for _ in range(each)])
    return problem.batch(order[: steps * size].reshape(steps, size))


def within(project: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Projects the updated parameters into a convex set.

    This transformation must be the last of a chain.
    """
    return optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda inside, w: inside - w,
            project(optax.apply_updates(params, updates)),
            params,
        )
    )


def slope(x: Any, y: Any) -> float:
    """Returns the exponent of the power law that fits the points best."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])

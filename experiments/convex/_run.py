"""A run of the real train step, looked at in every step."""

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
    """`look(w, batch)` before each step of a plain delay.

    Args:
      loss_fn: of parameters and a batch.
      tx: the optimizer.
      width: K.
      start: parameters.
      batches: pytree of [T, B, ...], a batch a step.
      look: what is asked of the parameters and the batch that comes.
      **settings: more of `pj.make_train_step`; by default one device.

    Returns:
      What was seen, [T, ...].
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
    """The parameters before each step, from 0, [T, ...]."""
    start = np.zeros(problem.optimum.shape)
    args = problem.loss_fn, tx, width, start, batches
    return observed(*args, look=lambda w, _: w, **settings)


def left(problem: problems.Problem, path: np.ndarray) -> float:
    """Mean excess over the last tenth of a path, every 20th step of it."""
    return float(np.mean([problem.excess(w) for w in path[-len(path) // 10 :: 20]]))


def epochs(problem: problems.Problem, steps: int, size: int, seed: int) -> Any:
    """Batches [steps, size, ...], each epoch in an order of its own."""
    rng = np.random.default_rng(seed)
    each = -(-steps * size // problem.size)
    order = np.concatenate([rng.permutation(problem.size) for _ in range(each)])
    return problem.batch(order[: steps * size].reshape(steps, size))


def within(project: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Put last: after it the parameters are inside a convex set."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda inside, w: inside - w,
            project(optax.apply_updates(params, updates)),
            params,
        )
    )


def slope(x: Any, y: Any) -> float:
    """The exponent of a power law through the points."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])

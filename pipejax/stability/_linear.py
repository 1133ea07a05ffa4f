"""An optimizer as a linear system, found by asking it.

SGD, momentum, Nesterov, averages and filters of gradients, decoupled weight decay: of
one parameter w, with g its gradient and s the floating leaves of the state, each is

  `(s', w') = A (s, w) + b g`

- SGD: no s; `w' = w - eta g`
- heavy-ball: `m' = mu m + g`, `w' = w - eta (mu m + g)`

Adam is not: it divides by what the gradients were.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

# Steps, after which bias corrections are over and schedules at their end.
_LATER = 2**20


class LinearUpdate(NamedTuple):
    """`(s', w') = state (s, w) + gradient g`, for one parameter.

    Attributes:
      state: float64 [n + 1, n + 1], of the n numbers of the state and, last, w.
      gradient: float64 [n + 1].
    """

    state: np.ndarray
    gradient: np.ndarray


def linear_update(tx: optax.GradientTransformation) -> LinearUpdate:
    """The matrices of `tx`, from its derivatives.

    Counters are set to a million steps.

    Raises:
      ValueError: if `tx` is not linear in state, parameter and gradient, or if it has
        a counter, and moves no parameter any more.
    """
    with jax.enable_x64(True):
        w = jnp.zeros((), jnp.float64)
        start = tx.init(w)
        first, rebuild = _floating(start)

        def respond(x: jax.Array) -> jax.Array:
            update, after = tx.update(x[-1], rebuild(x[:-2]), x[-2])
            return jnp.concatenate([_floating(after)[0], (x[-2] + update)[None]])

        points = np.random.default_rng(0).normal(size=(2, first.size + 2))
        matrix, other = (np.asarray(jax.jacfwd(respond)(x)) for x in points)
        at_point = np.asarray(respond(jnp.asarray(points[0])))
    if not (_close(matrix, other) and _close(matrix @ points[0], at_point)):
        raise ValueError(
            "`tx` must be linear in its gradients, as SGD with momentum is; got one"
            " that is not. Of Adam take the first moment alone,"
            " optax.chain(optax.ema(b1, debias=False), optax.scale(-learning_rate)),"
            " and the curvature of the loss over the square root of the second."
        )
    update = LinearUpdate(matrix[:, :-1], matrix[:, -1])
    if any(map(_counts, jax.tree.leaves(start))) and not _moves(update):
        raise ValueError(
            f"`tx` must still move parameters at step {_LATER}, got one that does not:"
            " give a schedule's largest learning rate as a number, and leave out what"
            " lets a step pass and then another."
        )
    return update


def _moves(update: LinearUpdate) -> bool:
    """Whether a gradient reaches the parameter, at once or later."""
    response = update.gradient
    for _ in range(len(response)):
        if response[-1]:
            return True
        response = update.state @ response
    return False


def _floating(state: Any) -> tuple[jax.Array, Any]:
    """The floating leaves as one vector, and what puts such a vector back."""
    leaves, structure = jax.tree.flatten(state)
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    vector, unravel = ravel_pytree(
        [x for x, chosen in zip(leaves, floating, strict=True) if chosen]
    )

    def rebuild(values: jax.Array) -> Any:
        given = iter(unravel(values.astype(vector.dtype)))
        return jax.tree.unflatten(
            structure,
            [
                next(given) if chosen else _later(x)
                for x, chosen in zip(leaves, floating, strict=True)
            ],
        )

    return vector.astype(jnp.float64), rebuild


def _later(leaf: jax.Array) -> jax.Array:
    """A counter, at a million."""
    return jnp.full_like(leaf, _LATER) if _counts(leaf) else leaf


def _counts(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-7))

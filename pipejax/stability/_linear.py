r"""An optimizer as a linear system, obtained by differentiating its `update`.

For one parameter w with gradient g, and with s the vector of the floating-point leaves
of the optimizer state, SGD, momentum, averages and filters of gradients, and decoupled
weight decay all have the form

$$(s', w') = A (s, w) + b g$$

where a prime marks the value after the step. Heavy-ball with learning rate eta and
momentum mu has `s = m`, with `m' = mu m + g` and `w' = w - eta (mu m + g)`. Adam is not
linear, because it divides by a function of past gradients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from pipejax._internal.structures import HYPERPARAMETERS

# A step number at which bias corrections have faded and schedules have ended.
_LATER = 2**20
# Magnitudes at which linearity is tested, on both sides of every threshold in use. The
# squares of the smallest and the largest are still normal numbers in float64.
_SCALES = 10.0 ** np.arange(-30, 31, 5)


class LinearUpdate(NamedTuple):
    """The matrices of `(s', w') = A (s, w) + b g`, for one parameter w."""

    state: np.ndarray  # A, float64 [n + 1, n + 1], for n numbers of the state, then w
    gradient: np.ndarray  # b, float64 [n + 1], in the same order


def linear_update(tx: optax.GradientTransformation) -> LinearUpdate:
    """Returns the matrices of `tx` at a late step, computed from its derivatives."""
    with jax.enable_x64(True):
        w = jnp.zeros((), jnp.float64)
        # Flags, such as that of a first step, are those after it.
        _, start = tx.update(jnp.zeros_like(w), tx.init(w), w)
        first, rebuild = _floating(start)

        def respond(x: jax.Array) -> jax.Array:
            update, after = tx.update(x[-1], rebuild(x[:-2]), x[-2])
            return jnp.concatenate([_floating(after)[0], (x[-2] + update)[None]])

        directions = _directions(first.size + 2)
        matrix = np.asarray(jax.jacfwd(respond)(jnp.asarray(directions[-1])))
        points = _SCALES[:, None, None] * directions
        values = np.asarray(jax.vmap(jax.vmap(respond))(jnp.asarray(points)))
    # A linear function multiplies any vector by its derivative at any other. Rounding
    # errors are relative to the terms of a sum. A learning rate, however small, is no
    # rounding error, so the tolerance of each row is relative to that row.
    errors = np.abs(values / _SCALES[:, None, None] - directions @ matrix.T)
    if not (errors <= 1e-5 * np.abs(directions) @ np.abs(matrix.T) + 1e-12).all():
        raise ValueError(
            "`tx` must be linear in its gradients, as SGD with momentum is; got one"
            " that is not. Leave out clipping, and an `accumulator_dtype` of 16"
            " bits, which rounds. For Adam, pass its first moment alone,"
            " optax.chain(optax.ema(b1, debias=False), optax.scale(-learning_rate)),"
            " and take the curvature from pj.stability.sharpness with"
            " preconditioner=sqrt(nu) + eps."
        )
    update = LinearUpdate(matrix[:, :-1], matrix[:, -1])
    counts = any(_counts(jnp.asarray(x)) for x in jax.tree.leaves(start))
    if counts and not _moves(update):
        raise ValueError(
            f"`tx` must still move parameters at step {_LATER}; got one that does not."
            " Pass the largest learning rate of a schedule as a number, and leave out"
            " wrappers that update only in some steps, such as optax.MultiSteps."
        )
    return update


def _moves(update: LinearUpdate) -> bool:
    """Returns whether a gradient ever changes the parameter."""
    response = update.gradient
    # By the Cayley-Hamilton theorem, a response that is zero for as many steps as there
    # are numbers in the state remains zero.
    for _ in range(len(response)):
        if response[-1]:
            return True
        response = update.state @ response
    return False


def _floating(state: Any) -> tuple[jax.Array, Any]:
    """Returns the floating leaves as a vector, and a function that restores them."""
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    paths = [(path, jnp.asarray(leaf)) for path, leaf in paths]
    leaves = [leaf for _, leaf in paths]
    # Hyperparameters do not depend on the gradients, and stay as they are.
    floating = [
        jnp.issubdtype(x.dtype, jnp.floating) and HYPERPARAMETERS not in path
        for path, x in paths
    ]
    vector, unravel = ravel_pytree(
        [x for x, chosen in zip(leaves, floating, strict=True) if chosen]
    )

    def rebuild(values: jax.Array) -> Any:
        given = iter(unravel(values.astype(vector.dtype)))
        late = [jnp.full_like(x, _LATER) if _counts(x) else x for x in leaves]
        pairs = zip(late, floating, strict=True)
        return jax.tree.unflatten(
            structure, [next(given) if chosen else x for x, chosen in pairs]
        )

    return vector.astype(jnp.float64), rebuild


def _counts(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.integer)


def _directions(size: int) -> np.ndarray:
    """Returns unit vectors, which show a threshold of one number, and random ones."""
    mixed = np.random.default_rng(0).normal(size=(4, size))
    return np.concatenate([np.eye(size), -np.eye(size), mixed])

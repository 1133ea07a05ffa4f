"""Delay compensation: a gradient carried over to newer parameters by a Taylor step."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipejax.train_step import check_width


class DelayCompensationState(NamedTuple):
    """What `delay_compensation` carries.

    Attributes:
      earlier: parameters of the last `width - 1` updates, oldest first: the oldest are
        those at which the gradient that comes next was taken.
      square: running mean of squared gradients.
    """

    earlier: tuple[optax.Params, ...]
    square: optax.Updates


def delay_compensation(
    width: int, *, strength: float = 2.0, decay: float = 0.95, eps: float = 1e-7
) -> optax.GradientTransformation:
    """Adds to a late gradient how it will have changed, by a guess of the Hessian.

    With w the parameters and v those of `width - 1` updates ago, where g was taken,

      `update(g) = g + strength / sqrt(s + eps) g * g * (w - v)`
      `s = decay s + (1 - decay) g * g`

    all of it element by element: `g g'` stands for the Hessian, as the Fisher matrix
    does, and of that only the diagonal (DC-ASGD-a).

    Args:
      width: pipeline width K, at least 1.
      strength: lambda of the paper, at least 0; 0 adds nothing.
      decay: of the running mean of squares, in [0, 1).
      eps: keeps the root away from 0.

    Returns:
      A transformation, to be put before an optimizer; `update` must be given `params`.

    Raises:
      ValueError: if an argument breaks its rule; in `update`, without parameters.

    Reference: Zheng et al., Asynchronous SGD with Delay Compensation, 2017,
      https://arxiv.org/abs/1609.08326
    """
    width = check_width(width)
    if not 0 <= strength < math.inf:
        raise ValueError(
            f"`strength` must be a finite number of at least 0, got {strength!r}."
        )
    if not 0 <= decay < 1:
        raise ValueError(f"`decay` must lie in [0, 1), got {decay!r}.")
    if not eps > 0:
        raise ValueError(f"`eps` must be a number above 0, got {eps!r}.")

    def init_fn(params: optax.Params) -> DelayCompensationState:
        # Copies, each: a loop that donates its parameters gives them away.
        earlier = tuple(jax.tree.map(jnp.copy, params) for _ in range(width - 1))
        return DelayCompensationState(earlier, jax.tree.map(jnp.zeros_like, params))

    def update_fn(
        updates: optax.Updates,
        state: DelayCompensationState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, DelayCompensationState]:
        if params is None:
            raise ValueError(
                "`params` must be given to `update`, got None: the gradient is carried"
                " over to them. Call `tx.update(gradients, state, params)`."
            )
        history = (*state.earlier, params)
        square = jax.tree.map(
            lambda s, g: decay * s + (1 - decay) * g * g, state.square, updates
        )

        def compensated(g: Any, s: Any, now: Any, then: Any) -> Any:
            return g + strength / jnp.sqrt(s + eps) * g * g * (now - then)

        carried = jax.tree.map(compensated, updates, square, params, history[0])
        return carried, DelayCompensationState(history[1:], square)

    return optax.GradientTransformation(init_fn, update_fn)

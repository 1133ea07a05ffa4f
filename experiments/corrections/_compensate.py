"""Delay compensation: a late gradient moved to the current parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class DelayCompensationState(NamedTuple):
    """State of `delay_compensation`.

    Attributes:
      earlier: The parameters before each of the last `width - 1` updates, oldest first.
        The next gradient was taken at the oldest of them.
      square: Running mean of squared gradients, a pytree like the parameters.
    """

    earlier: tuple[optax.Params, ...]
    square: optax.Updates


def delay_compensation(
    width: int, *, strength: float = 2.0, decay: float = 0.95, eps: float = 1e-7
) -> optax.GradientTransformation:
    r"""Adds to a late gradient an estimate of how much it has changed since.

    This is DC-ASGD-a, the variant of DC-ASGD with an adaptive strength. With w the
    current parameters, and v the parameters of `width - 1` updates ago, at which the
    gradient g was taken, a first-order Taylor expansion gives the gradient at w as
    `g + H (w - v)`. The outer product `g g^T` stands for the Hessian H, as in the
    Fisher matrix, and only its diagonal `g^2` is kept. Element by element, with s the
    running mean of `g^2`:

    $$s_t = \beta s_{t-1} + (1 - \beta) g^2$$

    $$update(g) = g + (\lambda / \sqrt{s_t + \epsilon}) g^2 (w - v)$$

    `pj.transforms.extrapolate_updates` moves the parameters at which the gradient is
    taken instead, and leaves the gradient as it is.

    Args:
      width: Pipeline width K, at least 1. At width 1 gradients are not changed.
      strength: The factor lambda, named as in the paper, at least 0.
      decay: Decay rate beta of the running mean s, in [0, 1).
      eps: A number epsilon above 0 that keeps the square root away from 0.

    Returns:
      An `optax.GradientTransformation`. Put it before an optimizer, and pass the
      current parameters to `update`. Its state holds `width` arrays for each parameter.

    References:
      Zheng et al., Asynchronous SGD with Delay Compensation, 2017,
      https://arxiv.org/abs/1609.08326
    """

    def init_fn(params: optax.Params) -> DelayCompensationState:
        # These are copies. A loop that donates its parameters and this state would
        # otherwise donate the same buffers twice.
        earlier = tuple(jax.tree.map(jnp.copy, params) for _ in range(width - 1))
        return DelayCompensationState(earlier, jax.tree.map(jnp.zeros_like, params))

    def update_fn(
        updates: optax.Updates,
        state: DelayCompensationState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, DelayCompensationState]:
        history = (*state.earlier, params)
        square = jax.tree.map(
            lambda s, g: decay * s + (1 - decay) * g * g, state.square, updates
        )

        def compensated(g: Any, s: Any, now: Any, then: Any) -> Any:
            return g + strength / jnp.sqrt(s + eps) * g * g * (now - then)

        carried = jax.tree.map(compensated, updates, square, params, history[0])
        return carried, DelayCompensationState(history[1:], square)

    return optax.GradientTransformation(init_fn, update_fn)

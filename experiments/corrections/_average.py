"""A moving average of gradients with a window of fixed length."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AverageGradientsState(NamedTuple):
    """State of `average_gradients`.

    Attributes:
      earlier: The previous `count - 1` gradients, oldest first, each a pytree like the
        parameters. Entries that no gradient has reached yet are zeros.
      seen: int32 scalar, the number of entries in `earlier` that hold a gradient.
    """

    earlier: tuple[optax.Updates, ...]
    seen: jax.Array


def average_gradients(count: int) -> optax.GradientTransformation:
    r"""Replaces each gradient by the mean of the last `count` gradients.

    With the gradient `g_t` of step t, counted from 1:

    $$update(g_t) = 1/n \sum_{j=0}^{n-1} g_{t-j}, n = \min(count, t)$$

    `optax.ema` computes `(1 - b) sum_j b^j g_{t-j}` with a decay b instead, so an old
    gradient fades slowly, whereas here it leaves the mean at once. `optax.MultiSteps`
    applies one mean every `count` steps, whereas here every step applies a mean.

    The average itself adds delay: for heavy-ball with momentum 0.9 at width 2, the
    largest stable learning rate times curvature falls from 0.1 to 0.068
    (`pj.stability.max_learning_rate`).

    Args:
      count: Number of gradients in the mean, at least 1. To correct for a pipeline,
        pass its width.

    Returns:
      An `optax.GradientTransformation`. Put it before an optimizer.
    """

    def init_fn(params: optax.Params) -> AverageGradientsState:
        # Every entry has its own buffers. A loop that donates this state would
        # otherwise donate the same buffer several times.
        earlier = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(count - 1))
        return AverageGradientsState(earlier, jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: AverageGradientsState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, AverageGradientsState]:
        del params
        all_of_them = (*state.earlier, updates)

        # The minimum is taken here too, because `pj.stability` sets every counter of a
        # state to a late step, above `count - 1`.
        seen = jnp.minimum(state.seen, count - 1)

        def mean(*gradients: jax.Array) -> Any:
            return sum(gradients) / (seen + 1).astype(gradients[0].dtype)

        after = jnp.minimum(seen + 1, count - 1)
        averaged = jax.tree.map(mean, *all_of_them)
        return averaged, AverageGradientsState(all_of_them[1:], after)

    return optax.GradientTransformation(init_fn, update_fn)

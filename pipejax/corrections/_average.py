"""The mean of the last gradients, in place of the last one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipejax.integers import is_integer


class AverageGradientsState(NamedTuple):
    """What `average_gradients` carries.

    Attributes:
      earlier: the `count - 1` gradients before, oldest first; zeros before the first.
      seen: int32, how many of them are gradients.
    """

    earlier: tuple[optax.Updates, ...]
    seen: jax.Array


def average_gradients(count: int) -> optax.GradientTransformation:
    """Replaces a gradient by the mean of the last `count`.

      `update(g[t]) = 1/n sum_{j < n} g[t-j]`,  `n = min(count, t)`

    It differs from `optax.ema`, `(1 - b) sum_j b^j g[t-j]`, in that it forgets all at
    once; and from `optax.MultiSteps`, which applies one mean every `count` steps.

    Args:
      count: n, at least 1. As a correction of a pipeline, its width.

    Returns:
      A transformation, to be put before an optimizer.

    Raises:
      ValueError: if `count` is not an integer of at least 1.
    """
    if not is_integer(count, 1):
        raise ValueError(f"`count` must be an integer of at least 1, got {count!r}.")

    def init_fn(params: optax.Params) -> AverageGradientsState:
        # Arrays of their own, each: a loop that donates its state gives all away.
        earlier = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(count - 1))
        return AverageGradientsState(earlier, jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: AverageGradientsState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, AverageGradientsState]:
        del params
        all_of_them = (*state.earlier, updates)

        # Bounded here too: `pj.stability` sets all counters of a state to a late step.
        seen = jnp.minimum(state.seen, count - 1)

        def mean(*gradients: jax.Array) -> Any:
            return sum(gradients) / (seen + 1).astype(gradients[0].dtype)

        after = jnp.minimum(seen + 1, count - 1)
        averaged = jax.tree.map(mean, *all_of_them)
        return averaged, AverageGradientsState(all_of_them[1:], after)

    return optax.GradientTransformation(init_fn, update_fn)

"""Weight prediction, and update-level error feedback: the same recursion.

A gradient that is applied c steps late had better be taken where the parameters will be
then. With x the parameters and d the update, guess that the next c updates are as the
last:

  `y[t] = x[t] + c d[t]`,  `x[t] = x[t-1] + d[t]`,  d from a gradient at an earlier y

What a loop carries is y. It moves by `d[t] + c (d[t] - d[t-1])`, which is error
feedback of updates: to each is added what the guess before it got wrong. So one
transformation is both, and they differ only in what one evaluates, x or y.

References: Chen et al., SpecTrain, 2018, https://arxiv.org/abs/1809.02839; Kosson et
al., Pipelined Backpropagation at Scale, 2021, https://arxiv.org/abs/2003.11666; Zmushko
et al., One-Step Gradient Delay, 2026, https://arxiv.org/abs/2606.30634
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ExtrapolateUpdatesState(NamedTuple):
    """What `extrapolate_updates` carries.

    Attributes:
      ahead: `c d[t]`, how far the parameters in the loop are ahead of x.
    """

    ahead: optax.Updates


def extrapolate_updates(steps: float) -> optax.GradientTransformation:
    """Keeps the parameters `steps` updates ahead, as far as the last update tells.

      `update(d[t]) = d[t] + steps (d[t] - d[t-1])`,  `d[0] = 0`

    Put it last in a chain: `optax.chain(optax.adamw(1e-3), extrapolate_updates(1))`.
    It differs from Nesterov's momentum, which looks ahead along the momentum before the
    gradient of this step is in it, by the delay it is meant for: `steps = width - 1`.

    Args:
      steps: c, how many updates ahead, at least 0.

    Returns:
      A transformation; of its parameters `unextrapolated` gives x.

    Raises:
      ValueError: if `steps` is negative or not finite.
    """
    if not 0 <= steps < math.inf:
        raise ValueError(
            f"`steps` must be a finite number of at least 0, got {steps!r}. At pipeline"
            " width K it is K - 1."
        )

    def init_fn(params: optax.Params) -> ExtrapolateUpdatesState:
        return ExtrapolateUpdatesState(jax.tree.map(jnp.zeros_like, params))

    def update_fn(
        updates: optax.Updates,
        state: ExtrapolateUpdatesState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ExtrapolateUpdatesState]:
        del params
        ahead = jax.tree.map(lambda d: steps * d, updates)
        moved = jax.tree.map(
            lambda d, now, before: d + (now - before), updates, ahead, state.ahead
        )
        return moved, ExtrapolateUpdatesState(ahead)

    return optax.GradientTransformation(init_fn, update_fn)


def unextrapolated(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """The parameters x behind those of a loop that looks ahead.

    Args:
      opt_state: the state of a chain with one `extrapolate_updates`.
      params: y, the loop's.

    Returns:
      `y - c d`.

    Raises:
      ValueError: if there is none in the state, or more than one.
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_state)
    found = [leaf for leaf in leaves if _is_state(leaf)]
    if len(found) != 1:
        raise ValueError(
            "`opt_state` must hold one ExtrapolateUpdatesState, got"
            f" {len(found)}. Give it the state of the chain that"
            " `extrapolate_updates` is in."
        )
    return jax.tree.map(lambda y, ahead: y - ahead, params, found[0].ahead)


def _is_state(node: Any) -> bool:
    return isinstance(node, ExtrapolateUpdatesState)

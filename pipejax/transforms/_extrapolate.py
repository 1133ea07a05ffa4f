"""Weight prediction from the last update, which is also error feedback of updates."""

import math
from typing import NamedTuple

import jax
import optax

from pipejax._internal.numbers import check_inexact, number
from pipejax._internal.ravel import wide_zeros


class ExtrapolateUpdatesState(NamedTuple):
    """State of `extrapolate_updates`.

    Attributes:
      ahead: The term `c d_t` by which the parameters of the loop are ahead of x.
    """

    ahead: optax.Updates


def extrapolate_updates(steps: float) -> optax.GradientTransformation:
    r"""Keeps the parameters of a training loop `steps` updates ahead.

    A gradient that is applied c updates late should be taken at the parameters to which
    it will be applied. With x the parameters, d the update and c for `steps`, the
    prediction y assumes that the next c updates equal the last one:

    $$y_t = x_t + c d_t, x_t = x_{t-1} + d_t$$

    A training loop carries y. The transformation moves y by

    $$update(d_t) = d_t + c (d_t - d_{t-1})$$

    with `d_0 = 0`. The second term adds to each update what the previous prediction got
    wrong, so this is also error feedback at the level of updates. The two methods
    differ only in the parameters that are evaluated: weight prediction evaluates x, and
    error feedback evaluates y.

    Nesterov momentum looks ahead by one step only, along the momentum before the
    gradient of the current step is added. The weight prediction of `pj.make_train_step`
    uses newer information, the gradients in flight of the device itself.

    Args:
      steps: The number c of updates to look ahead, a finite number of at least 0: the
        delay, `width - 1`.

    Returns:
      A transformation to be put last in a chain. `unextrapolated` returns x.

    Raises:
      ValueError: If `steps` is negative or not finite. In `init` and `update`, also for
        integer leaves.

    Examples:
      >>> import jax.numpy as jnp, pipejax as pj
      >>> tx = pj.transforms.extrapolate_updates(1)
      >>> state = tx.init(jnp.zeros(()))
      >>> for update in (1.0, 1.0, 4.0):
      ...     extrapolated, state = tx.update(jnp.array(update), state)
      ...     print(f"{extrapolated:.1f}")
      2.0
      1.0
      7.0

    References:
      Chen et al., SpecTrain, 2018, https://arxiv.org/abs/1809.02839

      Kosson et al., Pipelined Backpropagation at Scale, 2021,
      https://arxiv.org/abs/2003.11666

      Zmushko et al., One-Step Gradient Delay, 2026, https://arxiv.org/abs/2606.30634
    """
    if not 0 <= number(steps) < math.inf:
        raise ValueError(
            f"`steps` must be a finite number of at least 0, got {steps!r}. At pipeline"
            " width K, pass K - 1."
        )

    def init_fn(params: optax.Params) -> ExtrapolateUpdatesState:
        check_inexact("params", params)
        # In 16 bits, what is taken back would not be what was added.
        return ExtrapolateUpdatesState(wide_zeros(params))

    def update_fn(
        updates: optax.Updates,
        state: ExtrapolateUpdatesState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, ExtrapolateUpdatesState]:
        del params
        check_inexact("updates", updates)
        wide = optax.tree.cast_like(updates, state.ahead)
        ahead = optax.tree.scale(steps, wide)
        moved = optax.tree.add(wide, optax.tree.sub(ahead, state.ahead))
        return optax.tree.cast_like(moved, updates), ExtrapolateUpdatesState(ahead)

    return optax.GradientTransformation(init_fn, update_fn)


def unextrapolated(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """Returns the parameters `x = y - c d` without the extrapolation.

    Evaluate a model at x for weight prediction, and at y for error feedback.

    Args:
      opt_state: State of a chain that contains one `extrapolate_updates`.
      params: The parameters y of the loop.

    Raises:
      ValueError: If `opt_state` does not contain exactly one such state.
    """
    kind = ExtrapolateUpdatesState
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    found = [leaf for leaf in leaves if isinstance(leaf, kind)]
    if len(found) != 1:
        raise ValueError(
            "`opt_state` must hold one ExtrapolateUpdatesState, got"
            f" {len(found)}. Pass the state of the chain that contains"
            " `extrapolate_updates`."
        )
    ahead = found[0].ahead
    plain = optax.tree.sub(optax.tree.cast_like(params, ahead), ahead)
    return optax.tree.cast_like(plain, params)

"""The update: a reduced message applied, or held back.

- nothing has arrived (start of the pipeline): parameters and optimizer state stay
- the reduced gradient is not finite: likewise, and counted. The decision is taken from
  the reduced value, which every replica has, so it costs no communication
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._gradient import moved
from ._state import Message, PipelineState, StepInfo


def apply_message(
    tx: optax.GradientTransformationExtraArgs,
    state: PipelineState,
    message: Message,
    after: Any,
    arrived: jax.Array | bool,
) -> tuple[PipelineState, StepInfo]:
    """Applies the mean of one iteration's messages if it has arrived and is finite.

    A transformation that asks for `value` (such as `reduce_on_plateau`) gets the loss
    that belongs to these gradients.

    Args:
      tx: the optimizer, extra arguments allowed.
      state: before the update.
      message: the reduced message.
      after: model state as this device's loss left it; its non-floating leaves advance
        whether or not there is an update.
      arrived: bool scalar, whether `message` is real or only the pipeline's zeros.

    Returns:
      The state after the update, and what to report.
    """
    finite = _all_finite((message.gradients, message.model_state))
    applied = arrived & finite
    updates, opt_state = tx.update(
        message.gradients, state.opt_state, state.params, value=message.loss
    )
    keep = partial(jax.tree.map, lambda new, old: jnp.where(applied, new, old))
    change = keep(
        message.model_state, jax.tree.map(jnp.zeros_like, message.model_state)
    )
    state = state._replace(
        params=keep(optax.apply_updates(state.params, updates), state.params),
        opt_state=keep(opt_state, state.opt_state),
        model_state=moved(state.model_state, after, change),
        skipped=state.skipped + (arrived & ~finite),
    )
    loss, metrics = jax.tree.map(
        lambda m: jnp.where(arrived, m.astype(jnp.float32), jnp.nan),
        (message.loss, message.metrics),
    )
    info = StepInfo(
        loss=loss,
        metrics=metrics,
        applied=applied,
        skipped=state.skipped,
    )
    return state, info


def _all_finite(tree: Any) -> jax.Array:
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(finite).all()

"""The update: a reduced message applied, or held back.

- nothing has arrived (start of the pipeline): parameters and optimizer state stay
- the reduced gradient is not finite: likewise, and counted. The decision is taken from
  the reduced value, which every replica has, so it costs no communication
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from pipejax import buckets
from pipejax.buckets import Buckets

from ._gradient import moved
from ._state import Carry, Message, StepInfo


def apply_message(
    tx: optax.GradientTransformation,
    carry: Carry,
    total: Buckets,
    like: Message,
    after: Any,
    arrived: jax.Array,
    *,
    devices: int,
    reduce_dtype: DTypeLike | None,
) -> tuple[Carry, StepInfo]:
    """Applies the mean of one iteration's messages if it has arrived and is finite.

    Args:
      tx: the optimizer.
      carry: before the update.
      total: the messages, summed over devices, in buckets.
      like: the message's form, of `jax.ShapeDtypeStruct`s.
      after: model state as this device's loss left it; its non-floating leaves advance
        whether or not there is an update.
      arrived: bool scalar, whether `total` is real or only the pipeline's zeros.
      devices: how many it was summed over.
      reduce_dtype: the dtype it was summed in.

    Returns:
      The carry after the update, and what to report.
    """
    checked = buckets.sizes((like.gradients, like.model_state), reduce_dtype)
    finite = buckets.all_finite(total, checked)
    applied = arrived & finite
    summed = buckets.unflatten(total, like, reduce_dtype)
    mean = partial(jax.tree.map, lambda x: x / devices)

    def update() -> Any:
        # Divided here, where it fuses with the optimizer's own arithmetic, rather than
        # in one more pass over the buckets.
        message = mean(summed)
        updates, opt_state = updated(
            tx, message.gradients, carry.opt_state, carry.params, message.loss
        )
        params = optax.apply_updates(carry.params, updates)
        return params, opt_state, moved(carry.model_state, after, message.model_state)

    def hold() -> Any:
        still = jax.tree.map(jnp.zeros_like, like.model_state)
        return carry.params, carry.opt_state, moved(carry.model_state, after, still)

    params, opt_state, model_state = _either(applied, update, hold)
    skipped = carry.skipped + (arrived & ~finite).astype(jnp.int32)
    loss, metrics = jax.tree.map(
        lambda m: jnp.where(arrived, m.astype(jnp.float32), jnp.nan),
        mean((summed.loss, summed.metrics)),
    )
    return (
        carry._replace(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            skipped=skipped,
        ),
        StepInfo(loss=loss, metrics=metrics, applied=applied, skipped=skipped),
    )


def updated(
    tx: Any, gradients: Any, opt_state: Any, params: Any, loss: jax.Array
) -> tuple[Any, Any]:
    """Runs `tx.update`, with the loss as `value` where the optimizer takes it.

    `value` is of the same batch as the gradients. `optax.contrib.reduce_on_plateau` and
    `optax.polyak_sgd` read it, wrappers hand it on.

    Raises:
      ValueError: if the optimizer needs more, such as the function `value_fn` with
        which a line search computes the loss again.
    """
    try:
        return tx.update(gradients, opt_state, params, value=loss)
    except TypeError as error:
        if "unexpected keyword argument 'value'" in str(error):
            return tx.update(gradients, opt_state, params)
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            "`tx` must need nothing but gradients, parameters and the loss, because a"
            f" line search would exchange gradients again in every trial; {error}."
            " Choose an optimizer without a line search, such as optax.adamw."
        ) from error


def _either(
    predicate: jax.Array, new: Callable[[], Any], old: Callable[[], Any]
) -> Any:
    """`new()` where `predicate` holds, else `old()`.

    On CPU a branch: the update is then compiled by itself, as in a step written by
    hand, and has the same bits. Elsewhere a selection that fuses with the update: a
    branch would make the host wait for the device in every step.
    """
    return lax.platform_dependent(
        cpu=lambda: lax.cond(predicate, new, old),
        default=lambda: select(predicate, new(), old()),
    )


def select(predicate: jax.Array, new: Any, old: Any) -> Any:
    """Leaf by leaf, `new` where `predicate` holds, else `old`."""
    return jax.tree.map(lambda n, o: jnp.where(predicate, n, o), new, old)

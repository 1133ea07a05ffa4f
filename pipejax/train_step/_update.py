"""The update: a reduced message applied, or held back.

- nothing has arrived (start of the pipeline), or all weights are 0: parameters and
  optimizer state stay
- a reduced gradient is not finite: likewise, and counted. The decision is taken from
  the reduced value, which every replica has, so it costs no communication
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pipejax.executors import collective_axes
from pipejax.message import Message, Reduced, arrived_as, mean

from ._check_optimizer import check_kept_structure
from ._info import StepInfo
from ._loss import is_floating
from ._state import ReplicatedState


def apply_reduced(
    tx: optax.GradientTransformation,
    state: ReplicatedState,
    reduced: Reduced,
    after: Any,
    *,
    devices: int,
    alike: bool,
    platform: str,
    skip_nonfinite: bool,
) -> tuple[ReplicatedState, StepInfo]:
    """Applies the mean of one iteration's messages, if there is one to apply.

    Args:
      tx: the optimizer.
      state: before the update.
      reduced: the messages, summed over devices.
      after: model state as this device's loss left it; its non-floating leaves advance
        whether or not there is an update.
      devices: how many it was summed over.
      alike: whether all devices apply the same; else each applies messages of its own.
      platform: of the devices, such as "cpu".
      skip_nonfinite: whether an update that is not finite is held back.

    Returns:
      The state after the update, and what to report.
    """
    counts = reduced.counts
    skips = counts & ~reduced.finite if skip_nonfinite else jnp.zeros((), jnp.bool_)
    applied = counts & ~skips
    message = reduced.sum

    def update() -> Any:
        # Divided here, where it fuses with the optimizer's own arithmetic, rather than
        # in one more pass over the gradients.
        gradients = _mean_gradients(message, state.params, devices)
        loss = mean(message.passengers.loss, message, devices)
        updates, opt_state = updated(tx, gradients, state.opt_state, state.params, loss)
        check_kept_structure(state.opt_state, opt_state)
        params = optax.apply_updates(state.params, updates)
        changes = _mean_changes(message, state.model_state, devices)
        return params, opt_state, moved(state.model_state, after, changes)

    def hold() -> Any:
        still = jax.tree.map(jnp.zeros_like, _floating(state.model_state))
        return state.params, state.opt_state, moved(state.model_state, after, still)

    # A collective in a branch would wait in vain for devices in the other branch.
    branches = platform == "cpu" and (alike or not collective_axes(update))
    either = _branch if branches else _selection
    params, opt_state, model_state = either(applied, update, hold)
    skipped = state.skipped + skips.astype(jnp.int32)
    info = _info(message, counts, devices)
    return (
        state._replace(
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            skipped=skipped,
        ),
        info._replace(applied=applied, skipped=skipped),
    )


def moved(model_state: Any, after: Any, changes: Any) -> Any:
    """Returns `model_state` with the reduced `changes` added to its floating leaves.

    The model state obeys the parameters' recursion, `s[t] = s[t-1] + d[t-K]`, where `d`
    is the mean of what the devices changed. Other leaves (counters, PRNG keys) are the
    same on every device, need no reduction, and are taken from `after` at once.
    """
    return jax.tree.map(
        lambda d, s, a: a if d is None else s + d,
        changes,
        model_state,
        after,
        is_leaf=lambda d: d is None,
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


def _mean_gradients(message: Message, params: Any, devices: int) -> Any:
    sums = arrived_as(message.gradients, params)
    return jax.tree.map(lambda x: mean(x, message, devices), sums)


def _mean_changes(message: Message, model_state: Any, devices: int) -> Any:
    """Returns the mean over devices, whatever their weights."""
    sums = arrived_as(message.changes, _floating(model_state))
    return jax.tree.map(lambda x: x / devices, sums)


def _info(message: Message, arrived: jax.Array, devices: int) -> StepInfo:
    """Returns loss, metrics and weight, and whether they are real."""
    passengers = message.passengers
    # Under `jax_debug_nans` JAX raises at the first NaN, also where it says "nothing".
    nothing = 0.0 if jax.debug_nans.value else jnp.nan
    loss, metrics = jax.tree.map(
        lambda x: jnp.where(arrived, mean(x, message, devices), nothing),
        (passengers.loss, passengers.metrics),
    )
    weight = jnp.float32(1) if message.weight is None else message.weight
    return StepInfo(
        loss=loss,
        metrics=metrics,
        weight=jnp.where(arrived, weight, 0),
        arrived=arrived,
        applied=arrived,
        skipped=arrived,
    )


def _floating(model_state: Any) -> Any:
    """Returns the floating leaves, `None` in place of others."""
    return jax.tree.map(lambda x: x if is_floating(x) else None, model_state)


def _branch(
    predicate: jax.Array, new: Callable[[], Any], old: Callable[[], Any]
) -> Any:
    """Returns `new()` where `predicate` holds, else `old()`; computes one of them.

    For CPUs: the update is then compiled by itself, as in a step written by hand, and
    has the same bits.
    """
    return lax.cond(predicate, new, old)


def _selection(
    predicate: jax.Array, new: Callable[[], Any], old: Callable[[], Any]
) -> Any:
    """Returns `new()` where `predicate` holds, else `old()`; computes both.

    For accelerators: it fuses with the update, and a branch would make the host wait
    for the device in every step. Also where devices may differ in `predicate` and the
    optimizer has a collective.
    """
    return select(predicate, new(), old())


def select(predicate: jax.Array, new: Any, old: Any) -> Any:
    """Returns leaf by leaf `new` where `predicate` holds, else `old`."""
    return jax.tree.map(lambda n, o: jnp.where(predicate, n, o), new, old)

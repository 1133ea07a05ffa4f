"""Applies a reduced message, or holds it back.

Parameters and optimizer state stay as they are in two cases:

- Nothing has arrived (at the start of the pipeline), or all weights are 0.
- A reduced gradient or change of model state is not finite. This is also counted. Every
  replica decides from the same reduced message, so that the decision costs no
  communication. With `skip_nonfinite=False`, the message is applied.

If some gradients are not delayed (`_delayed`), each kind is decided by itself.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from pipejax._core.checks import check_kept_form
from pipejax._core.message import Message, Reduced, mean_as, mean_of
from pipejax._internal.structures import merged, no_leaf, select, with_zeros
from pipejax._internal.traced_axes import collective_axes
from pipejax._internal.types import Tree

from ._delayed import Updated, as_delayed, delays, of_each_kind
from ._info import StepInfo, info_of
from ._model_state import mean_changes, moved, unmoved
from ._part import Part, decided, norm_of_both
from ._state import Common, Trainable, with_constraints
from ._step import Computed, Settings


def apply(
    settings: Settings,
    state: Common,
    computed: Computed | None,
    reduced: Reduced,
    at_once: Reduced | None = None,
    *,
    alone: bool = False,
) -> tuple[Common, StepInfo]:
    """Applies the mean that is due, if it has arrived and is finite.

    `at_once` are the gradients of this step that are not delayed.

    Leaves of the model state that are not averaged advance even if nothing is applied.
    If `alone`, each device applies its own message, in a prediction.
    """
    counters = no_leaf(state.model_state)
    if computed is not None:
        counters = computed.counters
        state = state._replace(rng=computed.rng, step=computed.step)
    if reduced.updated is not None:
        state = state._replace(trainable=reduced.updated)
    devices = 1 if alone else lax.axis_size(settings.axis_name)
    part = functools.partial(decided, skip_nonfinite=settings.skip_nonfinite)
    late, rest, norm = part(reduced), None, None
    applies, skips = late.applies, late.skips
    if at_once is not None:
        rest = part(at_once)
        applies, skips = applies | rest.applies, skips | rest.skips
        norm = norm_of_both(late, rest, devices)
    message, trained = reduced.sum, state.trainable
    # `gathered` and `slopes` change in the exchange alone, and pass by the branch.
    learned = trained._replace(gathered=None, slopes=None)

    # Leaves of the model state that nothing moves are in no branch either.
    def update() -> tuple[Trainable, Tree]:
        changes = mean_changes(message, state.model_state, devices)
        new = moved(state.model_state, counters, changes)
        if message.gradients is None:  # the exchange has updated the others
            return learned, new
        flags = delays(settings.delayed, learned.params)
        if rest is None and all(jax.tree.leaves(flags)):
            return advanced(settings.tx, learned, message, devices), new
        old = unmoved(state.model_state, counters, message.changes)
        parts = advanced_in_parts(settings.tx, learned, flags, late, rest, devices)
        return parts, select(late.applies, new, old)

    def hold() -> tuple[Trainable, Tree]:
        return learned, unmoved(state.model_state, counters, message.changes)

    # A branch compiles the update by itself, as in a step by hand, with the same bits.
    # But a collective in it would wait in vain for devices in the other branch.
    if settings.branches and not (alone and collective_axes(update)):
        new, model_state = lax.cond(applies, update, hold)
    else:
        new, model_state = select(applies, update(), hold())
    model_state = merged(model_state, state.model_state)
    skipped = state.skipped + skips.astype(jnp.int32)
    info = info_of(reduced, devices, norm)
    state = state._replace(
        trainable=new._replace(gathered=trained.gathered, slopes=trained.slopes),
        model_state=model_state,
        skipped=skipped,
    )
    return with_constraints(state), info._replace(applied=applies, skipped=skipped)


def moving(state: Common, computed: Computed | None, changes: Tree) -> Common:
    """Returns a state without the leaves of the model state that a step leaves alone.

    A program that returned them would copy them. `completed` puts them back.
    """
    counters = no_leaf(state.model_state) if computed is None else computed.counters
    kept = jax.tree.map(
        lambda s, a, d: None if a is None and d is None else s,
        state.model_state,
        counters,
        changes,
    )
    return state._replace(model_state=kept)


def advanced(
    tx: optax.GradientTransformation,
    trainable: Trainable,
    message: Message,
    devices: int,
) -> Trainable:
    """Returns the arrays that are trained, after the update by a summed message."""
    # The division is done here, where it fuses with the optimizer's arithmetic.
    # Elsewhere it would take one more pass over the gradients.
    return _advanced_by(tx, trainable, *_means(message, trainable.params, devices))


def advanced_in_parts(
    tx: optax.GradientTransformation,
    trainable: Trainable,
    flags: Tree,
    late: Part,
    rest: Part | None,
    devices: int,
) -> Trainable:
    """Returns what is trained, after an update by gradients of which some are delayed.

    `flags` say which are. The optimizer is given zeros in place of gradients that are
    not applied.
    """
    params = trainable.params
    gradients, loss = _applied(late, params, devices)
    fresh = jnp.zeros((), jnp.bool_)
    if rest is not None:
        fresh = rest.applies
        others, newer = _applied(rest, params, devices)
        gradients = jax.tree.map(_together, params, gradients, others)
        loss = jnp.where(late.applies, loss, newer)
    advance = functools.partial(_advanced_by, tx, gradients=gradients, loss=loss)
    if all(jax.tree.leaves(flags)):  # every parameter has both
        return advance(trainable)
    by_late = Updated(advance(as_delayed(trainable)), late.applies)
    by_rest = Updated(trainable if rest is None else advance(trainable), fresh)
    return of_each_kind(flags, by_late, by_rest, trainable)


def _together(
    _: jax.Array, late: jax.Array | None, at_once: jax.Array | None
) -> jax.Array | None:
    """Returns the sum of two parts of a gradient, of which one may be missing."""
    if late is None or at_once is None:
        return at_once if late is None else late
    return late + at_once


def _applied(
    part: Part, params: optax.Params, devices: int
) -> tuple[optax.Updates, jax.Array]:
    gradients, loss = _means(part.reduced.sum, params, devices)
    return jax.tree.map(lambda g: jnp.where(part.applies, g, 0), gradients), loss


def _means(
    message: Message, params: optax.Params, devices: int
) -> tuple[optax.Updates, jax.Array]:
    """Returns the mean gradient and the mean loss of a summed message."""
    gradients = mean_as(message.gradients, params, message, devices)
    return gradients, mean_of(message.passengers.loss, message, devices)


def _advanced_by(
    tx: optax.GradientTransformation,
    trainable: Trainable,
    gradients: optax.Updates,
    loss: jax.Array,
) -> Trainable:
    params, opt_state, mean = trainable.params, trainable.opt_state, trainable.mean
    updates, new = updated(tx, gradients, opt_state, params, loss)
    if mean is not None:
        mean = mean.after(gradients, loss)
    params = optax.apply_updates(params, updates)
    return trainable._replace(params=params, opt_state=new, mean=mean)


def updated(
    tx: optax.GradientTransformation,
    gradients: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    loss: jax.Array,
) -> tuple[optax.Updates, optax.OptState]:
    """Runs `tx.update`, with the loss as `value` if the optimizer takes this argument.

    The loss and the gradients are those of the same batch.
    `optax.contrib.reduce_on_plateau` and `optax.polyak_sgd` read `value`, and wrappers
    hand it on.

    A gradient that is `None` is given as zeros: the optimizer does not read it.

    Raises a `ValueError` if the optimizer needs more, such as the function `value_fn`
    of a line search.
    """
    gradients = with_zeros(gradients, params)
    run: Any = functools.partial(tx.update, gradients, opt_state, params)
    try:
        try:
            updates, new = run(value=loss)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            updates, new = run()
    except TypeError as error:
        if not re.search("required (keyword-only|positional) arg", str(error)):
            raise
        raise _needs_more(str(error)) from error
    except KeyError as error:
        raise _needs_more(f"KeyError: {error}") from error
    check_kept_form(opt_state, new)
    return updates, new


def _needs_more(what: str) -> ValueError:
    return ValueError(
        "`tx` must need nothing but gradients, state, parameters and the loss as"
        f" `value`; got an update that ends with {what}. A line search or a Hessian"
        " would exchange gradients again in every step: choose an optimizer without"
        " one, such as optax.adamw. Bind other arguments in a transformation of your"
        " own. If it takes none, the error above shows where it fails."
    )

"""Checks the state that a step is given, and its messages in flight.

Each error message names the rule, the value and the remedy.
"""

from typing import Any

import jax
import optax
from jax.core import Tracer

from pipejax._core.checks import check_opt_state, is_array
from pipejax._core.message import (
    InFlight,
    Message,
    count,
    messages_of,
    width_of,
)
from pipejax._internal.structures import difference, paths
from pipejax._internal.types import Leaf, Tree

from ._state import Common, PipelineState


def check_state(state: Any, devices: set[Any], *, counted: bool) -> None:
    """Raises a `ValueError` unless `state` is a usable state on these devices.

    A state that was donated is not usable, because its arrays are deleted.

    If `counted`, the host must know `state.calls`.
    """
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the pj.PipelineState that `train.init` returned, got"
            f" {type(state).__name__}."
        )
    if counted and isinstance(state.calls, Tracer):
        raise ValueError(
            "`train.step` must not be traced in a run with `warmup_steps` or a schedule"
            " of all-reduces: which program runs is decided between steps, got a traced"
            " `state.calls`. Call it outside jit and scan, or make a train step"
            " without them."
        )
    if counted and state.calls is None:
        raise ValueError(
            "`state` must count its steps in a run with `warmup_steps` or a schedule of"
            f" all-reduces, got one of a train step without. {_GO_ON}"
        )
    step = state.step
    if not is_array(step):
        return
    check_not_donated(state)
    if step.committed and step.sharding.device_set != devices:
        raise ValueError(
            f"`state` must be of this mesh, on devices {_ids(devices)}; got one on"
            f" devices {_ids(step.sharding.device_set)}. {_GO_ON}"
        )


def check_not_donated(state: Tree) -> None:
    """Raises a `ValueError` if a program has overwritten an array of a state."""
    if any(map(is_deleted, jax.tree.leaves(state))):
        paths = jax.tree_util.tree_leaves_with_path(state)
        name = next(jax.tree_util.keystr(p) for p, leaf in paths if is_deleted(leaf))
        name = name.removeprefix(".").removeprefix("trainable.")
        raise ValueError(
            f"`state` must not have been donated, got one whose `{name}` is"
            " deleted: a step made with donate=True has overwritten it. Go on from the"
            " state which that step returned, or copy what you keep:"
            " `jax.tree.map(jnp.copy, state)`."
        )


def check_kind(state: PipelineState, inner: tuple[str, ...], *, sharded: bool) -> None:
    """Raises a `ValueError` unless the state is split as those of the train step."""
    split = state.trainable.gathered is not None
    if split != sharded:
        raise ValueError(
            f"`state` must be of a train step with shard_optimizer={sharded}, as this"
            f" one; got one of a train step with shard_optimizer={split}. {_GO_ON}"
        )
    if state.shards.inner != inner:
        raise ValueError(
            f"`state` must be of a mesh with the inner axes {inner}, as this train"
            f" step; got one of a mesh with {state.shards.inner}. {_GO_ON}"
        )


def check_optimizer_of(state: PipelineState, tx: optax.GradientTransformation) -> None:
    """Raises a `ValueError` unless the state holds a state of the optimizer `tx`."""
    whole = state.trainable.whole_params
    check_opt_state(tx, whole, state.opt_state, "state.opt_state", _GO_ON)


def is_deleted(leaf: Leaf) -> bool:
    """Returns whether a leaf is an array that a program has overwritten."""
    # This runs for every leaf in every step. `isinstance(leaf, jax.Array)` takes three
    # times as long.
    is_deleted = getattr(leaf, "is_deleted", None)
    return is_deleted is not None and not isinstance(leaf, Tracer) and is_deleted()


def _ids(devices: Any) -> list[int]:
    return sorted(device.id for device in devices)


def check_in_flight(
    in_flight: InFlight, width: int, devices: int, messages: int
) -> None:
    """Raises a `ValueError` unless the pipeline fits the train step."""
    found = width_of(in_flight)
    if found != width:
        raise ValueError(
            f"`state` must be of width {width}, as this train step; got one of width"
            f" {found}. {_GO_ON}"
        )
    parts = in_flight.filled.shape[0]
    if parts != devices:
        raise ValueError(
            f"`state` must be of this mesh, with {devices} devices; got one of"
            f" {parts} devices, which has as many gradients in flight. {_GO_ON}"
        )
    there = messages_of(in_flight)
    if there != messages:
        raise ValueError(
            f"`state` must be of this mesh, on which {messages} devices or hosts have"
            f" gradients of their own in flight; got one with {there}. {_GO_ON}"
        )


def check_empty(in_flight: InFlight) -> None:
    """Raises a `ValueError` if a synchronous step would leave gradients in flight."""
    if found := count(in_flight):
        raise ValueError(
            "`state` must have nothing in flight in a warm-up, whose steps are"
            f" synchronous; got one with {found} gradients. Drain it with the train"
            " step that it comes from."
        )


def check_pending(wanted: Message, in_flight: InFlight, devices: int = 1) -> None:
    """Raises a `ValueError` unless messages in flight have the form of `wanted`.

    `wanted` has every change of model state. `in_flight` is the pipeline of one device,
    or the concatenated ones of several.
    """
    if not in_flight.pending:
        return
    oldest = in_flight.pending[0]
    # Leaves that the loss function returns unchanged have no change in flight.
    sent = paths(oldest.changes)
    changes = jax.tree_util.tree_map_with_path(
        lambda path, x: x if path in sent else None, wanted.changes
    )
    for name, tree in (("gradients", wanted.gradients), ("changes", changes)):
        of_all = jax.tree.map(
            lambda x: x.update(shape=(devices * x.shape[0], *x.shape[1:])), tree
        )
        found = difference(name, of_all, getattr(oldest, name))
        if found:
            leaf, expected, there = found
            raise ValueError(
                f"`state` must have {name} in flight of these parameters, this model"
                " state, this `tx`, this `delayed` and this `reduce_dtype`:"
                f" `{leaf}` {expected}; got {there} in its place. {_GO_ON}"
            )


def check_mean(state: Common, wanted: bool) -> None:
    """Raises a `ValueError` unless a state has what weight prediction needs."""
    kept = state.trainable.mean is not None
    if wanted == kept:
        return
    raise ValueError(
        "`state` must be of a train step with this `weight_prediction`, `tx` and"
        f" number of devices, which {'keeps' if wanted else 'does not keep'} the mean"
        " gradient that was applied last (`state.mean`); got one"
        f" {'with' if kept else 'without'} it. {_GO_ON}"
    )


def check_room(message: Message, in_flight: InFlight) -> None:
    """Raises a `ValueError` if the queue in flight has no room for `message`.

    The passengers must agree in the structure of the metrics, and in whether there is a
    weight. The queue must have a place for each change of model state.
    """
    if not in_flight.pending:
        return
    _check_changes(message, in_flight.pending[0])
    fresh, found = message.passengers, in_flight.pending[0].passengers
    if (fresh.weighted, fresh.metrics_form) == (found.weighted, found.metrics_form):
        return
    names, there = fresh.names[1:], found.names[1:]
    if not there:
        raise ValueError(
            "`batch` must be given to `train.init` when `loss_fn` returns metrics or a"
            f" weight, which travel with the gradients; got {names} for which the state"
            " has no room. Call `train.init(params, ..., batch=batch)`, with arrays or"
            " their shapes, jax.ShapeDtypeStruct."
        )
    raise ValueError(
        f"`state` must have been made for what `loss_fn` returns, {names}; got one with"
        f" {there} in flight. {_GO_ON}"
    )


def _check_changes(message: Message, in_flight: Message) -> None:
    missing = paths(message.changes) - paths(in_flight.changes)
    if missing:
        leaf = min(map(jax.tree_util.keystr, missing))
        raise ValueError(
            "`state` must have been made for the model state that `loss_fn` changes,"
            f" got one of a loss that returns `model_state{leaf}` unchanged. Drain it"
            " with the train step that made it, then go on from"
            " `train.init(state.params, opt_state=state.opt_state,"
            " model_state=state.model_state, batch=batch)`."
        )
    if unused := paths(in_flight.changes) - paths(message.changes):
        leaf = min(map(jax.tree_util.keystr, unused))
        more = f" and {len(unused) - 1} more leaves" if len(unused) > 1 else ""
        raise ValueError(
            "`batch` must be given to `train.init` where `loss_fn` returns model state"
            " unchanged, to show that its changes need not travel; got a state with"
            f" room for changes of `model_state{leaf}`{more}. Call `train.init(params,"
            " ..., batch=batch)`. If the state is one of another loss function, drain"
            " it first with the train step that made it."
        )


_GO_ON = (
    "Drain it with the train step that made it, then go on from"
    " `train.init(state.params, opt_state=state.opt_state)`, with `model_state` and"
    " `rng` if it has them."
)

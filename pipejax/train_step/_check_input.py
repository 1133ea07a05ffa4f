"""Checks of what a train step is given: parameters, batch, state.

Each message names the argument, the rule, the value and the remedy.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from pipejax.message import InFlight, Message, Passengers, width_of

from ._gradient import empty_message
from ._state import PipelineState


def check_params(params: Any) -> None:
    """Raises a ValueError unless `params` holds floating arrays and nothing else."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("`params` must hold at least one array, got none.")
    for path, leaf in leaves:
        name = f"params{jax.tree_util.keystr(path)}"
        dtype = getattr(leaf, "dtype", type(leaf) if _is_number(leaf) else None)
        if dtype is None:
            raise ValueError(
                f"`params` must be floating arrays, got `{name}`, a"
                f" {type(leaf).__name__}. Keep what is no array in the loss function."
                " With Equinox: `params, static = eqx.partition(model,"
                " eqx.is_inexact_array)`, and `eqx.combine(params, static)` in the"
                " loss."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"`params` must be floating arrays, got `{name}` of dtype"
                f" {jnp.dtype(dtype).name}, which has no gradient. Keep it in"
                " `model_state`."
            )


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex)


def check_replicated(name: str, tree: Any) -> None:
    """Raises a ValueError if a leaf of `tree` is sharded over devices."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _is_array(leaf) and not leaf.sharding.is_fully_replicated:
            raise ValueError(
                f"`{name}` must be replicated, got `{name}{jax.tree_util.keystr(path)}`"
                f" sharded by {leaf.sharding}. pipejax does not support sharded models"
                " yet; to train this one replicated, pass"
                f" `jax.device_put({name}, NamedSharding(mesh, PartitionSpec()))`."
            )


def _is_array(leaf: Any) -> bool:
    """Returns whether `leaf` is an array on devices, and not a tracer of one."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _is_deleted(leaf: Any) -> bool:
    # In every step, of every leaf: `isinstance(leaf, jax.Array)` takes three times as
    # long as this.
    is_deleted = getattr(leaf, "is_deleted", None)
    return is_deleted is not None and not isinstance(leaf, Tracer) and is_deleted()


def check_keywords(loss_fn: Callable[..., Any], **given: Any) -> None:
    """Raises a ValueError unless `loss_fn` takes the keywords that it will be passed.

    Args:
      loss_fn: the loss; one without a signature, such as a built-in, is not checked.
      **given: `model_state` and `rng` as `train.init` was given them, `None` if not.
    """
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return
    keywords = {p.name: p for p in [*parameters][2:]}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, value in given.items():
        parameter = keywords.get(name)
        if value is not None and parameter is None and not takes_any:
            raise ValueError(
                f"`loss_fn` must take the keyword `{name}`, which `train.init` was"
                f" given; got a function of {[p.name for p in parameters]}. Add"
                f" `*, {name}` to its arguments, or do not give it to `train.init`."
            )
        if value is None and parameter and parameter.default is parameter.empty:
            raise ValueError(
                f"`{name}` must be given to `train.init`, because `loss_fn` takes it as"
                f" a keyword; got None. Call `train.init(params, {name}=...)`."
            )


def check_batch(batch: Any, devices: int, microbatches: int) -> None:
    """Raises a ValueError unless `batch` divides into devices and microbatches."""
    size, parts = common_length(batch), devices * microbatches
    if size is None:
        raise ValueError(
            "`batch` must hold arrays with one common leading axis, the examples; got"
            f" shapes {named_shapes('batch', batch)}. Broadcast what is shared over the"
            " batch, or close over it in the loss function."
        )
    if not size or size % parts:
        raise ValueError(
            "`batch` must divide among devices and microbatches: a global batch of"
            f" {size} is no positive multiple of {devices} devices x {microbatches}"
            f" microbatches = {parts}. Drop the remainder, or choose a multiple of"
            f" {parts}."
        )


def common_length(tree: Any) -> int | None:
    """Returns the leading axis that all arrays have in common, `None` without one."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else None


def named_shapes(name: str, tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every array by its path in the argument `name`."""
    return {
        f"{name}{jax.tree_util.keystr(path)}": jnp.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_state(state: Any, devices: set[Any], *, counted: bool) -> None:
    """Raises a ValueError unless `state` comes from `init`, on these devices.

    It must not have been donated.

    Args:
      state: of the user.
      devices: of the mesh.
      counted: whether the host must know the number of calls, so that `state.calls`
        must not be traced.
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
            " `state.calls`. Call it outside jit and scan, or warm up with"
            " `train.plain` first."
        )
    step = state.step
    if not _is_array(step):
        return
    if any(map(_is_deleted, jax.tree.leaves(state))):
        paths = jax.tree_util.tree_leaves_with_path(state)
        name = next(jax.tree_util.keystr(p) for p, leaf in paths if _is_deleted(leaf))
        raise ValueError(
            f"`state` must not have been donated, got one whose `{name[1:]}` is"
            " deleted: a step made with donate=True has overwritten it. Go on from the"
            " state which that step returned, or copy what you keep:"
            " `jax.tree.map(jnp.copy, state)`."
        )
    if step.committed and step.sharding.device_set != devices:
        raise ValueError(
            f"`state` must be of this mesh, on devices {_ids(devices)}; got one on"
            f" devices {_ids(step.sharding.device_set)}. {_GO_ON}"
        )


def _ids(devices: Any) -> list[int]:
    return sorted(device.id for device in devices)


def check_in_flight(
    in_flight: InFlight, width: int, devices: int, *, feeds_back: bool
) -> None:
    """Raises a ValueError unless the pipeline fits the step's width and devices.

    It must have a deviation exactly where the step feeds deviations back.
    """
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
    kept = in_flight.deviation is not None
    if kept != feeds_back:
        raise ValueError(
            f"`state` must {'' if feeds_back else 'not '}have a deviation to be fed"
            f" back, as this train step {'does' if feeds_back else 'does not'}; got one"
            f" {'with' if kept else 'without'} it. {_GO_ON}"
        )


def check_pending(
    state: Any, in_flight: InFlight, reduce_dtype: DTypeLike | None, devices: int = 1
) -> None:
    """Raises a ValueError unless messages in flight fit parameters and model state.

    Args:
      state: with the parameters and the model state.
      in_flight: of one device, or of several, one behind another.
      reduce_dtype: in which gradients travel.
      devices: how many.
    """
    if not in_flight.pending:
        return
    wanted = jax.eval_shape(
        lambda: empty_message(state.params, state.model_state, reduce_dtype)
    )
    for name in ("gradients", "changes"):
        expected = _forms(getattr(wanted, name), devices)
        found = _forms(getattr(in_flight.pending[0], name))
        differing = [k for k in expected | found if expected.get(k) != found.get(k)]
        if differing:
            first = differing[0]
            raise ValueError(
                f"`state` must have {name} in flight of these parameters, this model"
                f" state and this `reduce_dtype`: `{name}{first}`"
                f" {expected.get(first, 'is none of them')}; got"
                f" {found.get(first, 'nothing')} in its place. {_GO_ON}"
            )


def check_room(message: Message, in_flight: InFlight) -> None:
    """Raises a ValueError unless the passengers of `message` are those in flight."""
    if not in_flight.pending:
        return
    fresh, found = message.passengers, in_flight.pending[0].passengers
    if (fresh.weighted, fresh.metrics_form) == (found.weighted, found.metrics_form):
        return
    names = _names(fresh)
    if not _names(found):
        raise ValueError(
            "`batch` must be given to `train.init` when `loss_fn` returns metrics or a"
            f" weight, which travel with the gradients; got {names} for which the state"
            " has no room. Call `train.init(params, ..., batch=batch)`."
        )
    raise ValueError(
        f"`state` must have been made for what `loss_fn` returns, {names}; got one with"
        f" {_names(found)} in flight. {_GO_ON}"
    )


def _forms(tree: Any, devices: int = 1) -> dict[str, str]:
    """Returns dtype and shape of every leaf by its path, over so many devices."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype.name}"
        f"{[leaf.shape[0] * devices, *leaf.shape[1:]]}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _names(passengers: Passengers) -> list[str]:
    """Returns the names of metrics, and of the weight if there is one."""
    tree = jax.tree.unflatten(
        passengers.metrics_form, range(passengers.metrics_form.num_leaves)
    )
    paths = jax.tree_util.tree_leaves_with_path(tree)
    metrics = [f"metrics{jax.tree_util.keystr(path)}" for path, _ in paths]
    return [*metrics, *(["weight"] if passengers.weighted else [])]


_GO_ON = (
    "Drain it with the train step that made it, then go on from"
    " `train.init(state.params, opt_state=state.opt_state)`."
)

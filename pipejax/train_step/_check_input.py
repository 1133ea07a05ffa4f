"""Checks of what a train step is given: parameters, batch, state.

Each message names the argument, the rule, the value and the remedy.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax.contrib
from jax.core import Tracer
from jax.typing import DTypeLike

from pipejax import buckets
from pipejax.pipeline import PipelinedMeanState, lengths_of, width_of

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


def check_optimizer(opt_state: Any, *, plain_delay: bool) -> None:
    """Raises a ValueError if the optimizer's state shows that it cannot be delayed.

    Args:
      opt_state: the state, or its shapes.
      plain_delay: whether gradients are taken at parameters of an earlier step.
    """
    if _holds(opt_state, PipelinedMeanState):
        raise ValueError(
            "`tx` must not hold pj.pipelined_mean, got one in its state: the train step"
            " itself averages and delays the gradients. Leave it out, and set `width`."
        )
    if _holds(opt_state, optax.LookaheadState):
        raise ValueError(
            "`tx` must not hold optax.lookahead, whose parameters are pairs of fast and"
            " slow ones but whose gradients are of the fast ones alone; got one in its"
            " state. Keep a slow copy beside the train step, for example with"
            " optax.ema."
        )
    if plain_delay and _holds(opt_state, optax.contrib.SAMState):
        raise ValueError(
            "`tx` must not hold optax.contrib.sam with weight_prediction=False and a"
            " `width` above 1: a delay exchanges its two kinds of steps, and it"
            " diverges. Keep weight prediction on, or choose width=1."
        )


def _holds(state: Any, kind: type) -> bool:
    """Returns whether a node of `state` is of this kind."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


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


def check_state(state: Any, devices: set[Any]) -> None:
    """Raises a ValueError unless `state` comes from `init`, on these devices.

    It must not have been donated, nor be traced where the host must know the number of
    calls (`state.calls`).
    """
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the pj.PipelineState that `train.init` returned, got"
            f" {type(state).__name__}."
        )
    if isinstance(state.calls, Tracer):
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
    in_flight: PipelinedMeanState, width: int, devices: int, *, feeds_back: bool
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
    kept = bool(in_flight.deviation)
    if kept != feeds_back:
        raise ValueError(
            f"`state` must {'' if feeds_back else 'not '}have a deviation to be fed"
            f" back, as this train step {'does' if feeds_back else 'does not'}; got one"
            f" {'with' if kept else 'without'} it. {_GO_ON}"
        )


def check_lengths(in_flight: PipelinedMeanState, least: dict[str, int]) -> None:
    """Raises a ValueError unless gradients in flight have these dtypes and lengths.

    Args:
      in_flight: the pipeline of one device.
      least: elements of the gradients by dtype; passengers come on top.
    """
    lengths = lengths_of(in_flight)
    if in_flight.pending and (
        lengths.keys() != least.keys() or any(lengths[k] < least[k] for k in least)
    ):
        raise ValueError(
            "`state` must have gradients in flight of these parameters and this"
            f" `reduce_dtype`: at least {least} elements, got {lengths}. {_GO_ON}"
        )


def check_room(
    message: Any, in_flight: PipelinedMeanState, reduce_dtype: DTypeLike | None
) -> None:
    """Raises a ValueError unless the pipeline has room for all parts of `message`."""
    expected, lengths = buckets.sizes(message, reduce_dtype), lengths_of(in_flight)
    if not in_flight.pending or lengths == expected:
        return
    metrics = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(message.metrics)
    ]
    if lengths == buckets.sizes(message._replace(metrics=None), reduce_dtype):
        raise ValueError(
            "`batch` must be given to `train.init` when `loss_fn` returns metrics,"
            f" which travel with the gradients; got metrics {metrics} for which the"
            " state has no room. Call `train.init(params, ..., batch=batch)`."
        )
    raise ValueError(
        "`state` must have been made for what `loss_fn` returns: metrics"
        f" {metrics}, {expected} elements in all, got one with {lengths} in flight."
        f" {_GO_ON}"
    )


_GO_ON = (
    "Drain it with the train step that made it, then go on from"
    " `train.init(state.params, opt_state=state.opt_state)`."
)

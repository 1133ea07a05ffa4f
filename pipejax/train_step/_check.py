"""What a user may get wrong, checked in Python before anything is traced.

Each message names the argument, the rule, the value and the remedy.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax import buckets

from ._state import PipelineState


def check_width(width: int) -> int:
    """`width` as an int of at least 1, else a ValueError."""
    try:
        valid = not isinstance(width, bool) and operator.index(width) >= 1
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(
            f"`width` must be an integer of at least 1, got {width!r}. 1 is synchronous"
            " (D-Sync), 2 hides the all-reduce of one step behind the next."
        )
    return operator.index(width)


def check_count(name: str, value: int, least: int) -> int:
    """`value` as an int of at least `least`, else a ValueError."""
    try:
        valid = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(
            f"`{name}` must be an integer of at least {least}, got {value!r}."
        )
    return operator.index(value)


def check_floating(name: str, dtype: DTypeLike | None) -> DTypeLike | None:
    """`dtype`, or a ValueError if it is not a floating one."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`{name}` must be a floating dtype or None, got {dtype!r}. Choose"
            " jnp.bfloat16 or jnp.float32."
        )
    return dtype


def check_tx(tx: Any) -> Any:
    """`tx`, or a ValueError if it is not an Optax transformation."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            "`tx` must be an optax.GradientTransformation, with `init` and `update`;"
            f" got {type(tx).__name__}. For example optax.sgd(0.1)."
        )
    return tx


def check_mesh(mesh: Mesh, axis_name: str) -> Mesh:
    """`mesh`, or a ValueError if it has no such axis."""
    if axis_name not in mesh.shape:
        raise ValueError(
            f"`mesh` must have the axis {axis_name!r}, got the axes"
            f" {tuple(mesh.axis_names)}. Use pj.data_mesh(), or name the axis of the"
            " data: `axis_name=...`."
        )
    return mesh


def check_params(params: Any) -> None:
    """Every leaf of the parameters is a floating array."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("`params` must hold at least one array, got none.")
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"`params` must be floating arrays, got"
                f" `params{jax.tree_util.keystr(path)}` of dtype"
                f" {jnp.result_type(leaf).name}, which has no gradient. Keep it in"
                " `model_state`."
            )


def check_batch(batch: Any, devices: int, microbatches: int) -> None:
    """Every leaf has the same leading axis, which divides into the parts."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    parts = devices * microbatches
    if len(lengths) == 1 and () not in lengths:
        (size,) = lengths.pop()
        if size and size % parts == 0:
            return
        raise ValueError(
            "`batch` must divide among devices and microbatches: a global batch of"
            f" {size} is no positive multiple of {devices} devices x {microbatches}"
            f" microbatches = {parts}. Drop the remainder, or choose a multiple of"
            f" {parts}."
        )
    shapes = {
        f"batch{jax.tree_util.keystr(path)}": jnp.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    raise ValueError(
        "`batch` must hold arrays with one common leading axis, the examples; got"
        f" shapes {shapes}. Broadcast what is shared over the batch, or close over it"
        " in the loss function."
    )


def check_state(state: Any) -> None:
    """`state` is what `init` returns, and its warm-up known on the host."""
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the pj.PipelineState that `train.init` returned, got"
            f" {type(state).__name__}."
        )
    if isinstance(state.warmup_left, jax.core.Tracer):
        raise ValueError(
            "`train.step` must not be traced in a run with `warmup_steps`: which"
            " program runs is decided between them, got a traced `state.warmup_left`."
            " Call it outside jit and scan, or warm up with `train.plain` first."
        )


def check_in_flight(in_flight: Any, width: int, devices: int) -> None:
    """The pipeline in the state is as wide, and as long, as the step's own."""
    found = len(in_flight.reduced) + 2 if in_flight.pending else 1
    if found != width:
        raise ValueError(
            f"`state` must be of width {width}, as this train step; got one of width"
            f" {found}. Drain it with the train step that made it, then go on from"
            " `train.init(state.params, opt_state=state.opt_state)`."
        )
    rows = {v.shape[0] for v in in_flight.pending.values()} - {devices}
    if rows:
        raise ValueError(
            f"`state` must be of this mesh, with {devices} devices; got one of"
            f" {rows.pop()} devices, which has as many gradients in flight. Drain it"
            " with the train step that made it, then go on from"
            " `train.init(state.params, opt_state=state.opt_state)`."
        )


def check_room(
    message: Any, in_flight: Any, width: int, reduce_dtype: DTypeLike | None
) -> None:
    """Metrics have their place among the gradients in flight."""
    if width == 1 or not jax.tree.leaves(message.metrics):
        return
    without = buckets.sizes(message._replace(metrics=None), reduce_dtype)
    if {k: v.shape[-1] for k, v in in_flight.pending.items()} == without:
        names = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(message.metrics)
        ]
        raise ValueError(
            "`batch` must be given to `train.init` when `loss_fn` returns metrics,"
            f" which travel with the gradients; got metrics {names} for which the"
            " state has no room. Call `train.init(params, ..., batch=batch)`."
        )

"""Checks the arguments of `init`, the loss function's keywords, and batches.

Each error message names the argument, the rule, the value and the remedy.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh

from pipejax._internal.keys import is_key
from pipejax._internal.mesh import is_attached
from pipejax._internal.types import Leaf, Tree

from ._arrays import check_arrays, fault_of

_OVERWRITTEN = "_overwrite_with_gradient"
"""The collection in which Flax keeps what `TrainState.apply_gradients` overwrites."""


def check_params(params: optax.Params) -> None:
    """Raises a `ValueError` unless `params` has leaves and all of them are floating."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("`params` must hold at least one array, got none.")
    for path, leaf in leaves:
        name = f"params{jax.tree_util.keystr(path)}"
        if fault := fault_of(leaf):
            raise ValueError(
                f"`params` must be floating arrays, got `{name}`, {fault}. Keep what is"
                " no array in the loss function. With Equinox: `params, static ="
                " eqx.partition(model, eqx.is_inexact_array)`, and"
                " `eqx.combine(params, static)` in the loss."
            )
        if _OVERWRITTEN in (getattr(key, "key", None) for key in path):
            raise ValueError(
                f"`params` must not hold the collection `{_OVERWRITTEN}` of Flax, whose"
                f" gradients are its next values and which no optimizer must see; got"
                f" `{name}`. Give it to `train.init` as `model_state`, and return its"
                " gradient: `grads = jax.grad(loss, argnums=1)(params, model_state)`,"
                " `pj.Aux(model_state=grads)`."
            )
        if remedy := _not_trainable(leaf):
            dtype = jnp.result_type(leaf).name if not is_key(leaf) else leaf.dtype
            raise ValueError(
                f"`params` must be floating arrays, got `{name}` of dtype {dtype},"
                f" {remedy}"
            )


def _not_trainable(leaf: Leaf) -> str | None:
    if is_key(leaf):
        return "a PRNG key. Give it to `train.init` as `rng` or in `model_state`."
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (
            "whose gradient most optimizers get wrong. Split it into two real leaves,"
            " its real and its imaginary part, and join them in the loss function:"
            " `jax.lax.complex(real, imag)`."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        return "which has no gradient. Keep it in `model_state`."
    if jnp.finfo(dtype).bits < 16:
        return (
            "in which small updates are lost. Keep it in float32 or bfloat16, and cast"
            " it in the loss function."
        )
    return None


def check_attached(mesh: Mesh, params: optax.Params) -> None:
    """Raises a `ValueError` if arrays must go to devices that are not attached."""
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params))
    if not traced and not is_attached(mesh):
        raise ValueError(
            "`mesh` must be of devices that are attached, to place a state on them; got"
            f" {mesh.size} x {mesh.devices.flat[0].device_kind} that programs can only"
            " be compiled for. Take the shapes of the state alone:"
            " `train.abstract_state(params)`."
        )


def is_array(leaf: Leaf) -> bool:
    """Returns whether `leaf` is an array on devices, and not a tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def check_keywords(
    loss_fn: Callable[..., Any], method: str, passed: Mapping[str, Any]
) -> None:
    """Raises a `ValueError` unless `loss_fn` takes the keywords that it will be passed.

    It is also an error if `loss_fn` requires a keyword that it will not be passed.

    `method` names the method to which the user gives the values.

    A function without a signature, such as a built-in function, is not checked.
    """
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return
    keywords = {p.name: p for p in [*parameters][2:]}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, value in passed.items():
        parameter = keywords.get(name)
        if value is not None and parameter is None and not takes_any:
            raise ValueError(
                f"`loss_fn` must take the keyword `{name}`, which `{method}` was"
                f" given; got a function of {[p.name for p in parameters]}. Add"
                f" `*, {name}` to its arguments, or do not give it to `{method}`."
            )
        if value is None and parameter and parameter.default is parameter.empty:
            raise ValueError(
                f"`{name}` must be given to `{method}`, because `loss_fn` takes it as"
                f" a keyword; got None. Call `{method}(..., {name}=...)`."
            )


def check_batch(batch: Tree, devices: int, microbatches: int) -> None:
    """Raises a `ValueError` unless `batch` divides among devices and microbatches."""
    check_arrays("batch", batch)
    size, parts = common_length(batch), devices * microbatches
    if size is None:
        raise ValueError(
            "`batch` must hold arrays with one common leading axis, the examples; got"
            f" shapes {named_shapes('batch', batch)}. Make arrays of lists, and"
            " give what is the same for all of them to the loss as `shared`:"
            " `train.step(state, batch, shared=...)`. Other containers, such as graphs"
            " or ragged lists, need a row for each device: stack one padded container"
            " for each."
        )
    if not size or size % parts:
        raise ValueError(
            "`batch` must divide among devices and microbatches: a global batch of"
            f" {size} is no positive multiple of {devices} devices x {microbatches}"
            f" microbatches = {parts}. Drop the remainder, or choose a multiple of"
            f" {parts}."
        )


def common_length(tree: Tree) -> int | None:
    """Returns the length of the common leading axis, or `None` if there is none."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else None


def named_shapes(name: str, tree: Tree) -> str:
    """Returns the shapes of the first arrays as text, by their paths in an argument."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shapes = {
        f"{name}{jax.tree_util.keystr(path)}": jnp.shape(leaf)
        for path, leaf in leaves[:_SHOWN]
    }
    more = len(leaves) - len(shapes)
    return f"{shapes}" + (f" and {more} more" if more else "")


_SHOWN = 8

"""Checks of what `init` is given, and of a batch.

Each message names the argument, the rule, the value and the remedy.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax.contrib
from jax.core import Tracer

from pipejax.message import InFlight


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
        if is_array(leaf) and not leaf.sharding.is_fully_replicated:
            raise ValueError(
                f"`{name}` must be replicated, got `{name}{jax.tree_util.keystr(path)}`"
                f" sharded by {leaf.sharding}. pipejax does not support sharded models"
                " yet; to train this one replicated, pass"
                f" `jax.device_put({name}, NamedSharding(mesh, PartitionSpec()))`."
            )


def is_array(leaf: Any) -> bool:
    """Returns whether `leaf` is an array on devices, and not a tracer of one."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


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
    if _holds(opt_state, InFlight):
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


def check_opt_state(tx: optax.GradientTransformation, params: Any, given: Any) -> None:
    """Raises a ValueError unless `given` has the form that `tx` makes for `params`."""
    wanted = jax.eval_shape(tx.init, params)
    shapes, found = (named_shapes("opt_state", tree) for tree in (wanted, given))
    differing = [k for k in shapes | found if shapes.get(k) != found.get(k)]
    if differing:
        name = differing[0]
        rule, value = shapes.get(name, "is none of it"), found.get(name, "nothing")
    else:
        name, rule, value = "opt_state", *map(jax.tree.structure, (wanted, given))
        if rule == value:
            return
    raise ValueError(
        "`opt_state` must be a state of this train step's `tx` for these `params`:"
        f" `{name}` {rule}; got {value} in its place. Make the train step with the"
        " optimizer that the state is of, or leave it out to begin with a new one."
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

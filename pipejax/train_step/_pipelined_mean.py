"""The pipeline as an Optax transformation, for a step of one's own."""

from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pipejax import buckets
from pipejax.pipeline import (
    PipelinedMeanState,
    empty_pipeline,
    lengths_of,
    shift,
    width_of,
)

from ._check import check_width


def pipelined_mean(
    axis_name: str, width: int = 2, *, reduce_dtype: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Replaces gradients by their mean over `axis_name`, `width - 1` steps late.

    In step t, with `g_i` this device's gradient and p devices:

      `update(g_i[t]) = 1/p sum_i g_i[t - (width - 1)]`

    It differs from `lax.pmean(grads, axis_name)`, which returns `1/p sum_i g_i[t]`, by
    its delay alone; `width=1` is that pmean. The reduction of step t's gradients starts
    with step t+1 and depends on nothing that step computes, so that a scheduler may run
    it beside the whole forward and backward pass.

    Put it first in a chain, in place of the pmean:

      `optax.chain(pj.pipelined_mean("data", width=2), optax.sgd(0.1))`

    The first `width - 1` updates are zero, for there is nothing to apply. To SGD and
    momentum a zero gradient at the start is no step at all. An optimizer that counts
    steps or decays weights would still move; Optax holds it still:

      `optax.conditionally_mask(optax.adamw(1e-3), lambda step: step >= width - 1)`

    Args:
      axis_name: the axis of the surrounding `shard_map` or `pmap`.
      width: pipeline width K, at least 1.
      reduce_dtype: dtype of the sum and of what travels; `None` keeps each leaf's own.
        Updates come back in the gradients' dtypes.

    Returns:
      A transformation to be used inside `shard_map` or `pmap`. Its state differs
      between devices: give `shard_map` the specs of `pj.state_specs`.

    Raises:
      ValueError: for a width below 1; in `update`, outside `axis_name`, for gradients
        that differ in structure from the parameters or from the state, or that
        `jax.grad` has already summed over the axis.
    """
    width = check_width(width)

    def init_fn(params: optax.Params) -> PipelinedMeanState:
        return empty_pipeline(buckets.sizes(params, reduce_dtype), width)

    def update_fn(
        updates: optax.Updates,
        state: PipelinedMeanState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, PipelinedMeanState]:
        _check_axis_bound(axis_name)
        _check_not_summed(updates, axis_name)
        if params is not None:
            _check_same_shapes(updates, params)
        _check_state(state, width, buckets.sizes(updates, reduce_dtype))
        fresh = buckets.flatten(updates, reduce_dtype)
        if width == 1:
            total = lax.psum(fresh, axis_name)
        else:
            total, fresh = _late(lax.psum(state.pending[0], axis_name), fresh)
            state = shift(state, fresh)
        summed = buckets.unflatten(total, updates, reduce_dtype)
        devices = lax.axis_size(axis_name)
        return jax.tree.map(lambda x: x / devices, summed), state

    return optax.GradientTransformation(init_fn, update_fn)


def state_specs(tree: Any, axis_name: str = "data") -> Any:
    """Partition specs of a state that holds gradients in flight.

    Every device has its own gradients in flight and shares all else: `P(axis_name)`
    for a `PipelinedMeanState`, `P()` for every other leaf.

    Args:
      tree: an optimizer state, a Flax `TrainState`, any pytree, or its `eval_shape`.
      axis_name: the axis given to `pipelined_mean`.

    Returns:
      A pytree prefix of `tree` for the `in_specs` and `out_specs` of `shard_map`.
    """

    def in_flight(node: Any) -> bool:
        return isinstance(node, PipelinedMeanState)

    return jax.tree.map(
        lambda node: P(axis_name) if in_flight(node) else P(),
        tree,
        is_leaf=in_flight,
    )


def _late(sums: Any, fresh: Any) -> tuple[Any, Any]:
    """Both as they are, the sums not to be used before `fresh` is there.

    Without the barrier XLA puts the update, and with it the end of the all-reduce,
    before this step's compute, where nothing hides it.
    """
    late = lax.optimization_barrier((sums, fresh))
    # In JAX 0.10 under `check_vma=True` the barrier makes the sums vary over the axis,
    # as `fresh` does, and no cast without a collective undoes it. No barrier, then:
    # the values are the same, the overlap is up to XLA. JAX 0.12 keeps them apart.
    if jax.tree.map(_varying, late[0]) != jax.tree.map(_varying, sums):
        return sums, fresh
    return late


def _varying(x: Any) -> frozenset[str]:
    """The axes over which `x` is known to differ; none without `check_vma`."""
    return jax.typeof(x).manual_axis_type.varying


def _check_axis_bound(axis_name: str) -> None:
    """A ValueError outside `shard_map` or `pmap` over `axis_name`."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"`axis_name` must be an axis of the surrounding shard_map or pmap, got"
            f" {axis_name!r}, which is not bound here. Call `update` inside"
            f" jax.shard_map over a mesh with the axis {axis_name!r}."
        ) from None


def _check_same_shapes(updates: Any, params: Any) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    gradients, parameters = shapes(updates), shapes(params)
    if gradients != parameters:
        raise ValueError(
            "gradients must have the structure and shapes of the parameters: got"
            f" {gradients} for {parameters}. Take them with jax.grad with respect to"
            " the same pytree."
        )


def _check_not_summed(updates: Any, axis_name: str) -> None:
    """With `check_vma=True` jax.grad of replicated parameters sums over the axis."""
    tracks_axes = axis_name in _varying(lax.axis_index(axis_name))
    leaves = jax.tree.leaves(updates)
    if tracks_axes and leaves and not any(axis_name in _varying(g) for g in leaves):
        raise ValueError(
            f"gradients must differ between the devices of {axis_name!r}, got gradients"
            " that jax.grad has already summed over it, in step and not hidden. Take"
            " them with respect to"
            f" `jax.lax.pcast(params, {axis_name!r}, to='varying')`, or pass"
            " `check_vma=False` to jax.shard_map."
        )


def _check_state(
    state: PipelinedMeanState, width: int, expected: dict[str, int]
) -> None:
    found = lengths_of(state)
    if width_of(state) != width or (width > 1 and found != expected):
        raise ValueError(
            f"`state` must come from `init` of the same width and parameters: width"
            f" {width} with {expected} elements in flight, got width"
            f" {width_of(state)} with {found}. Call `init` again."
        )

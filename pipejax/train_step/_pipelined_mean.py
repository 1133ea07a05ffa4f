"""The paper's recursion, as an Optax transformation.

Worker i computes `g_i[t] = grad f_i(w[t])`; `g[t]` is the mean over workers.

- width 1: `w[t] = w[t-1] - u(g[t-1])`. D-Sync: all-reduce, then update.
- width 2: `w[t] = w[t-1] - u(g[t-2])`. Pipe-SGD: the all-reduce of the previous step's
  gradients needs nothing of this step, so it runs while this step computes.
- width K: `w[t] = w[t-1] - u(g[t-K])`. Constant staleness K-1, absorbs jitter.

Reference: Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pipejax import buckets

from ._check import check_width


class PipelinedMeanState(NamedTuple):
    """Gradients in flight: computed, not yet applied.

    Attributes:
      pending: this device's own newest gradient, not yet reduced, `{dtype: [1, n]}`;
        over a mesh of p devices `{dtype: [p, n]}`, row i that of device i. Empty at
        width 1.
      reduced: the `width - 2` means before it, oldest first, each `{dtype: [n]}`.
      filled: int32, how many gradients are in flight, at most `width - 1`.
    """

    pending: buckets.Buckets
    reduced: tuple[buckets.Buckets, ...]
    filled: jax.Array


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
        sizes = buckets.sizes(params, reduce_dtype)
        return PipelinedMeanState(
            pending={k: jnp.zeros((1, n), k) for k, n in sizes.items() if width > 1},
            reduced=tuple(
                {k: jnp.zeros(n, k) for k, n in sizes.items()} for _ in range(width - 2)
            ),
            filled=jnp.zeros((), jnp.int32),
        )

    def update_fn(
        updates: optax.Updates,
        state: PipelinedMeanState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, PipelinedMeanState]:
        _check_updates(updates, state, params, axis_name, width, reduce_dtype)
        fresh = buckets.flatten(updates, reduce_dtype)
        if width == 1:
            mean = lax.pmean(fresh, axis_name)
            return buckets.unflatten(mean, updates, reduce_dtype), state
        means = in_flight_means(state, axis_name)
        # A late consumer: without the barrier XLA puts the update, and with it the end
        # of the all-reduce, before this step's compute, where nothing hides it.
        (arriving, *waiting), fresh = lax.optimization_barrier((means, fresh))
        state = PipelinedMeanState(
            pending={k: v[None] for k, v in fresh.items()},
            reduced=tuple(waiting),
            filled=jnp.minimum(state.filled + 1, width - 1),
        )
        return buckets.unflatten(arriving, updates, reduce_dtype), state

    return optax.GradientTransformation(init_fn, update_fn)


def in_flight_means(
    state: PipelinedMeanState, axis_name: str
) -> tuple[buckets.Buckets, ...]:
    """The `width - 1` means in flight, oldest first; reduces the one that is pending.

    The newest `state.filled` of them are real, those before are zero.
    """
    pending = lax.pmean({k: v[0] for k, v in state.pending.items()}, axis_name)
    return (*state.reduced, pending)


def state_specs(tree: Any, axis_name: str = "data") -> Any:
    """Partition specs of a state that holds gradients in flight.

    Every device has its own pending gradient and shares all else: `P(axis_name)` for
    `PipelinedMeanState.pending`, `P()` for every other leaf.

    Args:
      tree: an optimizer state, a Flax `TrainState`, any pytree, or its `eval_shape`.
      axis_name: the axis given to `pipelined_mean`.

    Returns:
      A pytree prefix of `tree` for the `in_specs` and `out_specs` of `shard_map`.
    """

    def in_flight(node: Any) -> bool:
        return isinstance(node, PipelinedMeanState)

    return jax.tree.map(
        lambda node: in_flight_specs(axis_name) if in_flight(node) else P(),
        tree,
        is_leaf=in_flight,
    )


def in_flight_specs(axis_name: str) -> PipelinedMeanState:
    """One row of `pending` on each device; all else is the same on every device."""
    shared: Any = P()
    per_device: Any = P(axis_name)
    return PipelinedMeanState(per_device, shared, shared)


def _check_updates(
    updates: Any,
    state: PipelinedMeanState,
    params: Any,
    axis_name: str,
    width: int,
    reduce_dtype: DTypeLike | None,
) -> None:
    """Raises on what would otherwise fail deep in tracing, or not at all."""
    _check_axis_bound(axis_name)
    if params is not None:
        _check_same_structure(updates, params)
    _check_not_summed(updates, axis_name)
    if width == 1:
        return
    expected = buckets.sizes(updates, reduce_dtype)
    found = {k: v.shape[-1] for k, v in state.pending.items()}
    if found != expected or len(state.reduced) != width - 2:
        raise ValueError(
            f"`state` must come from `init` of the same width and parameters: width"
            f" {width} with {expected} elements in flight, got width"
            f" {len(state.reduced) + 2 if found else 1} with {found}. Call `init`"
            " again."
        )


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


def _check_same_structure(updates: Any, params: Any) -> None:
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


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying

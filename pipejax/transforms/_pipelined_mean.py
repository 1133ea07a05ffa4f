"""The pipeline as an Optax transformation, for a step of one's own."""

from typing import Any

import jax
import optax
from jax import lax
from jax.typing import DTypeLike

from pipejax.collectives import AllReduce, psum
from pipejax.mesh import AxisName, axes, axis_size
from pipejax.message import (
    InFlight,
    Message,
    Reduced,
    arrived_as,
    codec_states,
    empty,
    has_arrived,
    shift,
    summed,
    travelling,
    width_of,
)
from pipejax.train_step import check_all_reduce, check_axis_name, check_width


def pipelined_mean(
    axis_name: AxisName,
    width: int = 2,
    *,
    reduce_dtype: DTypeLike | None = None,
    all_reduce: AllReduce = psum(),
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

    The first `width - 1` updates are zero, because nothing has arrived yet. To SGD and
    momentum a zero gradient at the start is no step at all. An optimizer that counts
    steps or decays weights would still move: use `pj.pipelined`, which holds it still.

    Args:
      axis_name: the axis of the surrounding `shard_map` or `pmap`.
      width: pipeline width K, at least 1.
      reduce_dtype: dtype of the sum and of what travels; `None` keeps each leaf's own.
        Updates come back in the gradients' dtypes.
      all_reduce: how they are summed, and with which codec. One other than
        `pj.collectives.psum()` needs `check_vma=False` in `shard_map`, which does not
        know otherwise that all devices get the same; if its codec keeps a state, `init`
        too must be called inside. Of a sum that is not finite the codec keeps nothing.

    Returns:
      A transformation to be used inside `shard_map` or `pmap`. Its state differs
      between devices: give `shard_map` the specs of `pj.state_specs`.

    Raises:
      ValueError: for a width below 1; in `update`, outside `axis_name`, for gradients
        that differ in structure from the parameters or from the state, or that
        `jax.grad` has already summed over the axis.
    """
    axis_name, width = check_axis_name(axis_name), check_width(width)
    (all_reduce,) = check_all_reduce(all_reduce, axis_name, several=False).phases

    def message(tree: Any) -> Message:
        return Message(travelling(tree, reduce_dtype))

    def init_fn(params: optax.Params) -> InFlight:
        like = jax.eval_shape(message, params)
        return empty(like, width, codec_states(like, all_reduce, axis_name))

    def update_fn(
        updates: optax.Updates,
        state: InFlight,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, InFlight]:
        devices = axis_size(axis_name)
        _check_not_summed(updates, axes(axis_name)[0])
        if params is not None:
            _check_same_shapes(updates, params)
        fresh = message(updates)
        _check_state(state, width, fresh)
        due = fresh if width == 1 else state.pending[0]
        total, after = summed(due, state.codec_states, all_reduce, axis_name)
        if width > 1:
            total, fresh = _late(total, fresh)
        found = Reduced.of(total, has_arrived(state))
        after = found.settled(after, state.codec_states)
        sums = arrived_as(total.gradients, updates)
        mean = jax.tree.map(lambda x: x / devices, sums)
        return mean, shift(state, fresh, after, state.deviation)

    return optax.GradientTransformation(init_fn, update_fn)


def _late(sums: Any, fresh: Any) -> tuple[Any, Any]:
    """Both as they are, the sums not to be used before `fresh` is there.

    Without the barrier XLA puts the update, and with it the end of the all-reduce,
    before this step's compute, where nothing hides it.
    """
    # First all of `fresh` together: XLA otherwise computes its last gradient after the
    # end of the all-reduce, where that gradient hides nothing.
    late = lax.optimization_barrier((sums, lax.optimization_barrier(fresh)))
    # In JAX 0.10 under `check_vma=True` the barrier makes the sums vary over the axis,
    # as `fresh` does, and no cast without a collective undoes it. No barrier, then:
    # the values are the same, the overlap is up to XLA. JAX 0.12 keeps them apart.
    if jax.tree.map(_varying, late[0]) != jax.tree.map(_varying, sums):
        return sums, fresh
    return late


def _varying(x: Any) -> frozenset[str]:
    """The axes over which `x` is known to differ; none without `check_vma`."""
    return jax.typeof(x).manual_axis_type.varying


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


def _check_state(state: InFlight, width: int, fresh: Message) -> None:
    found, wanted = width_of(state), _form(fresh.gradients)
    pending = [_form(message.gradients) for message in state.pending]
    if found != width or any(form != wanted for form in pending):
        raise ValueError(
            "`state` must come from `init` of the same width and parameters: width"
            f" {width} with gradients {wanted} in flight, got width {found} with"
            f" {pending}. Call `init` again."
        )


def _form(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype.name}{list(leaf.shape)}"
        for path, leaf in leaves
    }

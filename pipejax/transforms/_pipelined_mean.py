"""The pipeline as an Optax transformation, for a hand-written training step."""

from typing import Any

import jax
import optax
from jax import lax
from jax.typing import DTypeLike

from pipejax._core.checks import (
    check_all_reduce,
    check_axis_name,
    check_floating,
    check_width,
)
from pipejax._core.message import (
    InFlight,
    Message,
    averaging,
    codec_states,
    empty,
    mean_as,
    shift,
    travelling,
    valid_in_step,
    width_of,
)
from pipejax._internal.mesh import AxisName, axes, axis_size
from pipejax._internal.numbers import check_inexact
from pipejax._internal.structures import named_forms, shapes
from pipejax.collectives import AllReduce, psum, run


def pipelined_mean(
    axis_name: AxisName,
    width: int = 2,
    *,
    reduce_dtype: DTypeLike | None = None,
    all_reduce: AllReduce = psum(),
) -> optax.GradientTransformation:
    r"""Replaces gradients by their mean over devices, `width - 1` steps late.

    With the gradient `g_{i,t}` of device i in step t, K for `width` and p devices:

    $$update(g_{i,t}) = 1/p \sum_j g_{j,t-(K-1)}$$

    `lax.pmean(grads, axis_name)` is the case `width=1`. At a larger width, the
    gradients of step t are summed in step t+K-1. The sum depends on nothing that this
    step computes, so it may run beside the whole forward and backward pass. If an
    algorithm has several collectives in turn, only the last one may, whereas
    `make_train_step` puts compute beside each. Between CPU processes, nothing is
    hidden.

    Put the transformation first in a chain, in place of the `pmean`:

        optax.chain(pj.pipelined_mean("data", width=2), optax.sgd(0.1))

    The first K-1 updates are zero, because no gradient has arrived yet. For an
    optimizer that counts steps or decays weights, use `pj.pipelined`, which leaves its
    state as it is until a gradient has arrived.

    Args:
      axis_name: The axis of the surrounding `shard_map` or `pmap`, or a tuple of axes.
      width: Pipeline width K, at least 1.
      reduce_dtype: dtype in which gradients are sent and summed. `None` keeps the dtype
        of each leaf. Updates have the dtypes of the gradients.
      all_reduce: The algorithm that sums gradients, with its codec. If it is not
        `pj.collectives.psum()`, `shard_map` needs `check_vma=False`, and `init` must be
        called inside `shard_map` too, because it depends on the number of devices. The
        codec states do not change if a gradient is not finite.

    Returns:
      A transformation, to be used inside `shard_map` or `pmap`. Its state differs
      between devices: give `shard_map` the specs of `pj.state_specs`.

    Raises:
      ValueError: If an argument breaks its rule. In `init` and `update`, also for
        integer leaves. In `update`, also outside of `axis_name`, for gradients or a
        state of another form, and for gradients that `jax.grad` has already summed over
        the axis.

    References:
      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """
    axis_name, width = check_axis_name(axis_name), check_width(width)
    reduce_dtype = check_floating("reduce_dtype", reduce_dtype)
    (all_reduce,) = check_all_reduce(all_reduce, axis_name, several=False).phases

    def message(tree: Any) -> Message:
        return Message(travelling(tree, reduce_dtype))

    def init_fn(params: optax.Params) -> InFlight:
        check_inexact("params", params)
        like = jax.eval_shape(message, params)
        return empty(like, width, codec_states(like, all_reduce, axis_name))

    def update_fn(
        updates: optax.Updates,
        state: InFlight,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, InFlight]:
        check_inexact("updates", updates)
        devices = axis_size(axis_name)
        for axis in axes(axis_name):
            _check_not_summed(updates, axis)
        if params is not None:
            _check_same_shapes(updates, params)
        fresh = message(updates)
        _check_state(state, width, fresh)
        due = fresh if width == 1 else state.pending[0]
        valid = valid_in_step(state.filled[0], width - 1).message
        exchange = averaging(due, valid, all_reduce, axis_name)
        value, after = run(exchange.stages, exchange.start, state.codec_states)
        if width > 1:
            value, fresh = _late(value, fresh)
        total = exchange.end(value).sum
        mean = mean_as(total.gradients, updates, total, devices)
        return mean, shift(state, fresh, after)

    return optax.GradientTransformation(init_fn, update_fn)


def _late(sums: Any, fresh: Any) -> tuple[Any, Any]:
    """Returns both unchanged, and keeps the sums unused until `fresh` is computed."""
    # Without a barrier, XLA puts the update before the compute of this step. The
    # all-reduce would then end there too, where nothing hides it.
    # The inner barrier joins all of `fresh`. Without it, XLA computes the last gradient
    # after the end of the all-reduce, where that gradient hides nothing.
    late = lax.optimization_barrier((sums, lax.optimization_barrier(fresh)))
    # In JAX 0.10 with `check_vma=True`, the type of the sums varies over the axis after
    # the barrier, as that of `fresh` does. No cast undoes this without a collective.
    # The barrier is then left out: the values are the same, and the overlap is up to
    # XLA. In JAX 0.12, the type of the sums does not change.
    if jax.tree.map(_varying, late[0]) != jax.tree.map(_varying, sums):
        return sums, fresh
    return late


def _varying(x: Any) -> frozenset[str]:
    """Returns the axes over which `x` is known to differ; none without `check_vma`."""
    return jax.typeof(x).manual_axis_type.varying


def _check_same_shapes(updates: Any, params: Any) -> None:
    gradients, parameters = shapes(updates), shapes(params)
    if gradients != parameters:
        raise ValueError(
            "gradients must have the structure and shapes of the parameters: got"
            f" {gradients} for {parameters}. Take them with jax.grad with respect to"
            " the same pytree."
        )


def _check_not_summed(updates: Any, axis_name: str) -> None:
    # With `check_vma=True`, `jax.grad` sums the gradients of replicated parameters.
    tracks_axes = axis_name in _varying(lax.axis_index(axis_name))
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    summed = [path for path, g in leaves if axis_name not in _varying(g)]
    if tracks_axes and summed:
        raise ValueError(
            f"gradients must differ between the devices of {axis_name!r}, got gradients"
            " that jax.grad has already summed over it, in step and not hidden:"
            f" `gradients{jax.tree_util.keystr(summed[0])}`, or made without use of a"
            " batch. Take them with respect to"
            f" `jax.lax.pcast(params, {axis_name!r}, to='varying')`, or pass"
            " `check_vma=False` to jax.shard_map."
        )


def _check_state(state: InFlight, width: int, fresh: Message) -> None:
    found, wanted = width_of(state), named_forms(fresh.gradients)
    pending = [named_forms(message.gradients) for message in state.pending]
    if found != width or any(form != wanted for form in pending):
        raise ValueError(
            "`state` must come from `init` of the same width and parameters: width"
            f" {width} with gradients {wanted} in flight, got width {found} with"
            f" {pending}. Call `init` again. If only dtypes differ, cast the gradients"
            " to those of the parameters, or set `reduce_dtype`."
        )

"""An optimizer whose gradients are averaged over devices and applied late."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pipejax._core.checks import (
    check_kept_form,
    check_optimizer,
    check_params,
    check_tx,
)
from pipejax._core.message import InFlight
from pipejax._core.prediction import Kind, Mean, Update, kind_of
from pipejax._internal.mesh import AxisName
from pipejax._internal.numbers import check_inexact
from pipejax.collectives import AllReduce, psum

from ._pipelined_mean import pipelined_mean


class PipelinedState(NamedTuple):
    """State of `pipelined`.

    Attributes:
      in_flight: This device's gradients that are computed but not yet applied.
      calls: int32 scalar, the number of calls of `update`, at most `width - 1`.
      inner_state: The state of the optimizer, the same on all devices.
      mean: The mean gradient that was applied last, if `pj.predicted_params` needs it:
        the width is above 1 and the optimizer is not linear in its gradients.
    """

    in_flight: InFlight
    calls: jax.Array
    inner_state: optax.OptState
    mean: Mean | None


def pipelined(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    width: int = 2,
    *,
    reduce_dtype: DTypeLike | None = None,
    all_reduce: AllReduce = psum(),
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients over devices, `width - 1` steps late, and updates with `tx`.

    With the gradient `g_{i,t}` of device i in step t, K for `width`, p devices, and
    `-u(g)` the update that `tx` returns for a gradient g:

    $$update(g_{i,t}) = -u(1/p \sum_j g_{j,t-(K-1)})$$

    The first K-1 calls return updates of zero and leave the state of `tx` as it is,
    because no gradient has arrived yet. Only in these calls does
    `optax.chain(pj.pipelined_mean(axis_name, width), tx)` differ: it passes zeros to
    `tx`, which may move moments, decay weights and advance schedules.

    Use `pipelined` in place of `tx` and of the mean over devices, inside
    `jax.shard_map`:

        tx = pj.pipelined(optax.adamw(1e-3), "data")
        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)

    Args:
      tx: The optimizer, which may be a whole chain of transformations.
      axis_name: Same as in `pipelined_mean`.
      width: Pipeline width K, at least 1. With 1, gradients are averaged and applied in
        the same step.
      reduce_dtype: Same as in `pipelined_mean`.
      all_reduce: Same as in `pipelined_mean`.

    Returns:
      A transformation, to be used as that of `pipelined_mean`. Its `update` passes
      extra arguments on to `tx`. Give `shard_map` the specs of `pj.state_specs`.

    Raises:
      ValueError: In the same cases as `pipelined_mean`. In `init` and `update`, also if
        `tx` is an optimizer that cannot be given a late mean gradient.

    References:
      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """
    mean = pipelined_mean(
        axis_name, width, reduce_dtype=reduce_dtype, all_reduce=all_reduce
    )
    tx = _with_extra_args(check_tx(tx))

    def init_fn(params: optax.Params) -> PipelinedState:
        check_inexact("params", params)
        inner_state = tx.init(params)
        check_optimizer(inner_state)
        kind = kind_in(tx, params, width - 1)
        keeps = kind is not None and kind.name != "linear"
        if keeps:
            check_params(params)
        kept = Mean.empty(params, reduce_dtype) if keeps else None
        return PipelinedState(mean.init(params), jnp.int32(0), inner_state, kept)

    def update_fn(
        updates: optax.Updates,
        state: PipelinedState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, PipelinedState]:
        arrived = state.calls >= width - 1
        gradients, in_flight = mean.update(updates, state.in_flight, params)
        new = tx.update(gradients, state.inner_state, params, **extra_args)
        check_kept_form(state.inner_state, new[1])
        held = optax.tree.zeros_like(new[0]), state.inner_state
        updates, inner_state = jax.tree.map(
            lambda n, h: jnp.where(arrived, n, h), new, held
        )
        calls = jnp.minimum(state.calls + 1, width - 1)
        kept = state.mean
        if kept is not None:
            after = kept.after(gradients, kept.loss)
            kept = jax.tree.map(lambda n, h: jnp.where(arrived, n, h), after, kept)
        return updates, PipelinedState(in_flight, calls, inner_state, kept)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def kind_in(
    tx: optax.GradientTransformation, params: optax.Params, count: int
) -> Kind | None:
    """Returns how an optimizer's update depends on gradients, for a prediction.

    Returns `None` if nothing is in flight, or if the update needs more than gradients
    and parameters.

    Raises a `ValueError` if the update has a collective over an axis that is not bound.
    """
    if not count:
        return None
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    try:
        opt_state = jax.eval_shape(tx.init, shapes)
        return kind_of(update_of(tx), shapes, opt_state, count)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        return None
    except KeyError:  # of an argument that the update takes by name
        return None
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            "`init` must be called where the axes are bound over which `tx` has"
            f" collectives, got {error}. Call it inside of jax.shard_map, and"
            " jax.eval_shape on the function that jax.shard_map returns."
        ) from error


def _with_extra_args(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes extra arguments, if need be without any use."""
    # `optax.MultiSteps` takes some and is no `GradientTransformationExtraArgs`.
    kinds = [x.kind for x in inspect.signature(tx.update).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return optax.with_extra_args_support(tx)


def update_of(tx: optax.GradientTransformation) -> Update:
    """Returns the update of an optimizer as predictions take it."""

    def update(gradients: Any, opt_state: Any, params: Any, loss: Any) -> Any:
        del loss
        updates, new = tx.update(gradients, opt_state, params)
        check_kept_form(opt_state, new)
        return updates, new

    return update

"""An optimizer whose gradients are averaged over devices and applied late."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pipejax.collectives import AllReduce, psum
from pipejax.mesh import AxisName
from pipejax.message import InFlight
from pipejax.train_step import check_kept_structure, check_optimizer

from ._pipelined_mean import pipelined_mean


class PipelinedState(NamedTuple):
    """State of `pipelined`.

    Attributes:
      in_flight: this device's gradients that are computed and not yet applied; each
        device has its own.
      calls: int32 scalar, how often `update` was called, at most `width - 1`.
      inner_state: the state of the optimizer, the same on all devices.
    """

    in_flight: InFlight
    calls: jax.Array
    inner_state: optax.OptState


def pipelined(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    width: int = 2,
    *,
    reduce_dtype: DTypeLike | None = None,
    all_reduce: AllReduce = psum(),
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over devices, `width - 1` steps late, and updates with `tx`.

    In step t, with `g_i` the gradient of device i, p devices, `u` the update of `tx`:

      `update(g_i[t]) = u(1/p sum_i g_i[t - (width - 1)])`, and 0 for `t < width - 1`

    The first `width - 1` calls leave the state of `tx` as it is: nothing has arrived
    yet, and a zero gradient would still move moments, decay weights and advance
    schedules. `optax.chain(pj.pipelined_mean(axis_name, width), tx)` differs from this
    in those calls only, where it passes zeros to `tx`.

    Use it in place of `tx` and of the mean over devices, inside `jax.shard_map`:

      `tx = pj.pipelined(optax.adamw(1e-3), "data")`
      `updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)`

    Args:
      tx: the optimizer, a whole chain of transformations.
      axis_name: as for `pipelined_mean`.
      width: pipeline width K, at least 1; 1 averages and updates in the same step.
      reduce_dtype: as for `pipelined_mean`.
      all_reduce: as for `pipelined_mean`.

    Returns:
      A transformation, to be used as that of `pipelined_mean`. It hands extra arguments
      of `update` on to `tx`. Give `shard_map` the specs of `pj.state_specs`.

    Raises:
      ValueError: as `pipelined_mean`; in `init` and `update`, for an optimizer that
        cannot be given a late mean gradient.
    """
    mean = pipelined_mean(
        axis_name, width, reduce_dtype=reduce_dtype, all_reduce=all_reduce
    )
    tx = optax.with_extra_args_support(tx)

    def init_fn(params: optax.Params) -> PipelinedState:
        inner_state = tx.init(params)
        check_optimizer(inner_state, plain_delay=False)
        return PipelinedState(mean.init(params), jnp.int32(0), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: PipelinedState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, PipelinedState]:
        arrived = state.calls >= width - 1
        gradients, in_flight = mean.update(updates, state.in_flight, params)
        new = tx.update(gradients, state.inner_state, params, **extra_args)
        check_kept_structure(state.inner_state, new[1])
        held = optax.tree.zeros_like(new[0]), state.inner_state
        updates, inner_state = jax.tree.map(
            lambda n, h: jnp.where(arrived, n, h), new, held
        )
        calls = jnp.minimum(state.calls + 1, width - 1)
        return updates, PipelinedState(in_flight, calls, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

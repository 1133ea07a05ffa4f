"""Weight prediction for a hand-written training step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax.message import InFlight, arrivals, mean_as

from ._pipelined import PipelinedState


def predicted_params(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
) -> optax.Params:
    """Returns the parameters to which this device's own gradients in flight would lead.

    With the parameters w, the width K of the pipeline, and `-u(g)` the update that `tx`
    returns for a gradient g, device i predicts in step t:

    $$v_{i,t} = w_t - u(g_{i,t-K+1}) - ... - u(g_{i,t-1})$$

    Each update starts from the state of `tx` that the update before it returned. Take
    the gradient at the prediction, and apply it to the parameters as they are:

        tx = pj.pipelined(optimizer, "data")
        ahead = pj.predicted_params(optimizer, opt_state, params)
        updates, opt_state = tx.update(jax.grad(loss)(ahead), opt_state, params)

    `pj.make_train_step` does the same by default, and its documentation says what it is
    good for. `pj.corrections.extrapolate_updates` predicts from the last update alone.

    Args:
      tx: The optimizer that was given to `pj.pipelined`. For a chain that begins with
        `pj.pipelined_mean`, all that follows in the chain, as one transformation.
      opt_state: The state of the pipelined optimizer, or of the chain.
      params: The parameters.

    Returns:
      The predicted parameters. They differ between devices, so the function must be
      called inside `shard_map` or `pmap`.

    Raises:
      ValueError: If `opt_state` is the state of another optimizer.
      TypeError: If `tx` needs more than gradients and parameters, such as the loss as
        `value`, which is not kept with gradients in flight.
    """
    in_flight, state, arrived = _parts(opt_state)
    for own, real in zip(in_flight.pending, arrived, strict=True):
        gradients = mean_as(own.gradients, params, own, 1)
        updates, new = tx.update(gradients, state, params)
        new = optax.apply_updates(params, updates), new
        params, state = jax.tree.map(
            lambda n, o, real=real: jnp.where(real, n, o), new, (params, state)
        )
    return params


def _parts(opt_state: Any) -> tuple[InFlight, Any, Sequence[Any]]:
    """Returns the pipeline, the optimizer's state, and which gradients to apply."""
    if isinstance(opt_state, PipelinedState):
        in_flight = opt_state.in_flight
        return in_flight, opt_state.inner_state, arrivals(in_flight)
    if (
        isinstance(opt_state, tuple)
        and len(opt_state) > 1
        and isinstance(opt_state[0], InFlight)
    ):
        in_flight, *rest = opt_state
        # The chain passes the zeros of the start to the optimizer, as is done here.
        every = [True] * len(in_flight.pending)
        return in_flight, rest[0] if len(rest) == 1 else tuple(rest), every
    raise ValueError(
        "`opt_state` must be the state of pj.pipelined(tx, ...), or of a chain that"
        f" begins with pj.pipelined_mean; got one of {jax.tree.structure(opt_state)}."
    )

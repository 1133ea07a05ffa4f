"""Weight prediction for a step of one's own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax.message import InFlight, arrivals, arrived_as

from ._pipelined import PipelinedState


def predicted_params(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
) -> optax.Params:
    """Returns the parameters to which this device's own gradients in flight would lead.

    With `w` the parameters, `u` the update of `tx` and K the pipeline's width, of
    device i at step t:

      `v_i[t] = w[t] - u(g_i[t-K+1]) - ... - u(g_i[t-1])`

    Take the gradient there, and apply it to the parameters as they are:

      `tx = pj.pipelined(optimizer, "data")`
      `ahead = pj.predicted_params(optimizer, opt_state, params)`
      `updates, opt_state = tx.update(jax.grad(loss)(ahead), opt_state, params)`

    `pj.make_train_step` does the same by default; its documentation says what it is
    good for.

    Args:
      tx: the optimizer given to `pj.pipelined`; of a chain that begins with
        `pj.pipelined_mean`, what follows that, as one transformation.
      opt_state: the state of the pipelined optimizer, or of that chain.
      params: the parameters.

    Returns:
      Parameters, each device's own: to be used inside `shard_map` or `pmap`.

    Raises:
      ValueError: if `opt_state` is of another optimizer.
    """
    in_flight, state, arrived = _parts(opt_state)
    for own, real in zip(in_flight.pending, arrived, strict=True):
        gradients = arrived_as(own.gradients, params)
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
        # A chain passes the zeros of the start to the optimizer; so does a prediction.
        every = [True] * len(in_flight.pending)
        return in_flight, rest[0] if len(rest) == 1 else tuple(rest), every
    raise ValueError(
        "`opt_state` must be the state of pj.pipelined(tx, ...), or of a chain that"
        f" begins with pj.pipelined_mean; got one of {jax.tree.structure(opt_state)}."
    )

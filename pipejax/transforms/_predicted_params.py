"""Weight prediction for a step of one's own."""

from typing import Any

import jax
import optax
from jax.typing import DTypeLike

from pipejax import buckets
from pipejax.pipeline import PipelinedMeanState


def predicted_params(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    *,
    reduce_dtype: DTypeLike | None = None,
) -> optax.Params:
    """Where this device's own gradients in flight would lead.

    With `w` the parameters, `u` the update of `tx` and K the pipeline's width, of
    device i at step t:

      `v_i[t] = w[t] - u(g_i[t-K+1]) - ... - u(g_i[t-1])`

    Take the gradient there, and apply it to the parameters as they are:

      `tx = optax.chain(pj.pipelined_mean("data"), inner)`
      `ahead = pj.predicted_params(inner, opt_state, params)`
      `updates, opt_state = tx.update(jax.grad(loss)(ahead), opt_state, params)`

    That is what `pj.make_train_step` does by default; its documentation says what it is
    good for.

    Args:
      tx: what follows `pipelined_mean` in the chain, as one transformation.
      opt_state: the chain's state, gradients in flight first.
      params: the parameters.
      reduce_dtype: that of `pipelined_mean`.

    Returns:
      Parameters, each device's own: to be used inside `shard_map` or `pmap`.

    Raises:
      ValueError: if `opt_state` does not begin with the state of `pipelined_mean`.
    """
    if not (
        isinstance(opt_state, tuple)
        and len(opt_state) > 1
        and isinstance(opt_state[0], PipelinedMeanState)
    ):
        raise ValueError(
            "`opt_state` must be the state of a chain that begins with"
            f" pj.pipelined_mean, got one of {jax.tree.structure(opt_state)}. Take"
            " optax.chain(pj.pipelined_mean(...), tx)."
        )
    pipeline, *rest = opt_state
    state: Any = rest[0] if len(rest) == 1 else tuple(rest)
    for own in pipeline.pending:  # zeros at the start, as the chain will have them
        gradients = buckets.unflatten(own, params, reduce_dtype)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params

"""Weight prediction for a hand-written training step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax._core.checks import check_tx, opt_state_difference
from pipejax._core.message import InFlight, Reduced, mean_as, valid_in_queue
from pipejax._core.prediction import Mean, Own, changed, predicted

from ._pipelined import PipelinedState, kind_in, update_of


def predicted_params(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
) -> optax.Params:
    r"""Returns the parameters to which the gradients in flight are expected to lead.

    Let w be the parameters, s the state of `tx`, `U(g; s)` the change of the parameters
    by its update, m the mean gradient that was applied last, and `g_i` the gradient in
    flight of device i. At width 2, the device predicts

    $$v_i = w + U(m; s) + P (g_i - m), P = dU/dg$$

    at m, element by element, as `pj.make_train_step` does by default; see there for
    other widths and optimizers. Take the gradient at the prediction, and apply it to
    the parameters as they are:

        tx = pj.pipelined(optimizer, "data")
        ahead = pj.predicted_params(optimizer, opt_state, params)
        updates, opt_state = tx.update(jax.grad(loss)(ahead), opt_state, params)

    A chain that begins with `pj.pipelined_mean` keeps no m, and neither does
    `pipelined` for an optimizer that is linear in its gradients. The prediction is then
    `w + U(g_i; s)`, by one own gradient in flight after another.
    `pj.transforms.extrapolate_updates` predicts from the last update alone.

    Args:
      tx: The optimizer that was given to `pj.pipelined`. For a chain that begins with
        `pj.pipelined_mean`, all that follows in the chain, as one transformation.
      opt_state: The state of the pipelined optimizer, or of the chain.
      params: The parameters.

    Returns:
      The predicted parameters. They differ between devices, so call this function
      inside `shard_map` or `pmap`.

    Raises:
      ValueError: If `tx` is no optimizer, or `opt_state` the state of another one.
      TypeError or KeyError: If `tx` needs more than gradients and parameters, such as
        the loss as `value`, which is not kept with gradients in flight.

    References:
      Chen et al., SpecTrain, 2018, https://arxiv.org/abs/1809.02839
    """
    tx = check_tx(tx)
    in_flight, state, arrived, mean = _parts(opt_state)
    if found := opt_state_difference(tx, params, state):
        leaf, rule, value = found
        raise ValueError(
            f"`opt_state` must hold a state of `tx` for these parameters: `{leaf}`"
            f" {rule}; got {value} in its place. Give the optimizer that pj.pipelined"
            " was given, and not what it returned."
        )
    pending = in_flight.pending
    gradients = [mean_as(x.gradients, params, x, 1) for x in pending]
    nothing = jnp.float32(0)
    update = update_of(tx)
    if mean is None:
        losses = [nothing] * len(pending)
        if not pending:
            return params
        change = changed(update, params, state, gradients, losses, arrived)
        return optax.apply_updates(params, change)
    kind = kind_in(tx, params, len(pending))
    if kind is None or kind.name == "linear":
        raise ValueError(
            "`tx` must be the optimizer that pj.pipelined was given, which is not"
            " linear in its gradients; got one that is, or that needs more than"
            " gradients."
        )
    valid = map(jnp.asarray, arrived)
    reduced = map(Reduced.of, pending, valid)
    own = [
        Own.of(each, nothing, found.valid, found.usable)
        for each, found in zip(gradients, reduced, strict=True)
    ]
    return predicted(kind, update, params, state, mean, own)


def _parts(opt_state: Any) -> tuple[InFlight, Any, Sequence[Any], Mean | None]:
    if isinstance(opt_state, PipelinedState):
        in_flight, mean = opt_state.in_flight, opt_state.mean
        return in_flight, opt_state.inner_state, valid_in_queue(in_flight), mean
    if (
        isinstance(opt_state, tuple)
        and len(opt_state) > 1
        and isinstance(opt_state[0], InFlight)
    ):
        in_flight, *rest = opt_state
        # The chain passes the zeros of the start to the optimizer, as is done here.
        every = [True] * len(in_flight.pending)
        return in_flight, rest[0] if len(rest) == 1 else tuple(rest), every, None
    raise ValueError(
        "`opt_state` must be the state of pj.pipelined(tx, ...), or of a chain that"
        f" begins with pj.pipelined_mean; got one of {jax.tree.structure(opt_state)}."
    )

r"""Computes what one microbatch adds to a device's message, times its weight.

Let `L_j` be the loss of device j, `W_j` its weight, and `v_i` the parameters at which
device i takes its gradient. The gradient that device i adds is

$$G_i = d/dv_i \sum_j W_j L_j$$

There are two cases:

- A loss without collectives. `L_j` depends on `v_j` alone, so that

  $$G_i = W_i dL_i/dv_i$$

- A loss with a collective, such as batch normalization over all devices. Every loss
  depends on all `v_i`, so the weights must be applied before the collectives of the
  backward pass exchange derivatives. Each device j differentiates its loss times
  `W_j / W`, where W is the largest weight, and multiplies the result by W. A dtype of
  small range then need not hold a number of tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Passengers
from pipejax._internal.mesh import AxisName, axes
from pipejax._internal.ravel import working_dtype
from pipejax._internal.shards import constrained
from pipejax._internal.traced_axes import collective_axes
from pipejax._internal.types import Keys, ModelState, Tree

from ._loss import Loss, Returned
from ._model_state import averaged


def contribution(
    full: Loss,
    params: optax.Params,
    batch: Tree,
    model_state: ModelState,
    rng: Keys,
    *,
    axis_name: AxisName,
    specs: tuple[P, ...],
    local_steps: bool = False,
) -> tuple[optax.Updates, Passengers, Returned]:
    """Runs the loss, in its full form, and its gradient.

    A weight of 0 keeps averaged leaves of the model state as they were.

    In `local_steps`, a loss with a collective between groups must have no weight.
    """
    of_params = functools.partial(full, batch=batch, model_state=model_state, rng=rng)
    loss, vjp, returned = jax.vjp(of_params, params, has_aux=True)
    weight, metrics = returned.weight, returned.metrics
    # The largest float16 is 65,504. A loss times its number of tokens may exceed it.
    wide = loss.astype(working_dtype(loss.dtype))
    if weight is None:
        (gradients,) = vjp(jnp.ones_like(loss))
        # Without this, XLA may sum whole gradients on every device of a group.
        return constrained(gradients, specs), Passengers.of(wide, metrics), returned
    empty, talks = weight == 0, collective_axes(of_params, params)
    shared = tuple(name for name in axes(axis_name) if name in talks)
    if shared and local_steps:
        raise ValueError(
            "`loss_fn` must not both return a weight and have a collective between the"
            f" groups of local steps, here over {', '.join(map(repr, shared))}: the"
            " losses of other groups depend on the parameters of a group, but have"
            " other weights. Leave the weight out, or let the loss use statistics of"
            " its own group alone."
        )
    if shared:
        most = lax.pmax(weight, shared)
        (gradients,) = vjp((weight / jnp.where(most == 0, 1, most)).astype(loss.dtype))
        # On a device of weight 0, the finite elements are derivatives of the losses of
        # other devices and must be kept.
        gradients = jax.tree.map(
            lambda g: _times(most, g, empty & ~jnp.isfinite(g)), gradients
        )
    else:
        (gradients,) = vjp(jnp.ones_like(loss))
        gradients = _times(weight, gradients, empty)
    wide, metrics = _times(weight, (wide, metrics), empty)
    passengers = Passengers.of(wide, metrics, weight)
    after = jax.tree.map(
        lambda a, b: jnp.where(empty, b, a) if averaged(b) and a is not b else a,
        returned.model_state,
        model_state,
    )
    returned = dataclasses.replace(returned, model_state=after)
    return constrained(gradients, specs), passengers, returned


def combined(
    gradients: optax.Updates, each: Passengers
) -> tuple[optax.Updates, Passengers]:
    """Returns what m microbatches add: their mean, or their sum if there are weights.

    `gradients` are their sum, and `each` has a leading axis of length m.
    """
    if each.weighted:
        return gradients, dataclasses.replace(each, values=each.values.sum(axis=0))
    count = each.values.shape[0]
    gradients = jax.tree.map(lambda g: g / count, gradients)
    return gradients, dataclasses.replace(each, values=each.values.mean(axis=0))


def _times(weight: jax.Array, tree: Tree, nothing: jax.Array) -> Any:
    """Multiplies arrays by a weight; sets to 0, even if NaN, what `nothing` selects."""

    def times(x: jax.Array) -> jax.Array:
        wide = working_dtype(x.dtype)
        product = x.astype(wide) * weight.astype(wide)
        return jnp.where(nothing, 0, product).astype(x.dtype)

    return jax.tree.map(times, tree)

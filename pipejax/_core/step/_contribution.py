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

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax._internal.mesh import AxisName, axes
from pipejax._internal.ravel import working_dtype
from pipejax._internal.shards import constrained
from pipejax._internal.traced_axes import collective_axes
from pipejax._internal.types import Keys, ModelState, Tree

from ._loss import Loss, Unchanged
from ._model_state import averaged


class Contribution(NamedTuple):
    """The part of a message that one microbatch adds, or all of them together.

    If there is a weight, gradients, loss and metrics are multiplied by it.

    Attributes:
      loss: Scalar, in float32, or in float64 if the loss function returns float64.
      metrics: Pytree of float32 scalars.
      weight: float32 scalar, or `None` if the loss function returns no weight.
    """

    gradients: optax.Updates
    loss: jax.Array
    metrics: Tree
    weight: jax.Array | None


def contribution(
    full: Loss,
    params: optax.Params,
    batch: Tree,
    model_state: ModelState,
    rng: Keys,
    *,
    axis_name: AxisName,
    specs: tuple[P, ...],
) -> tuple[Contribution, Any, Unchanged]:
    """Runs the loss, in its full form, and its gradient.

    Args:
      params: Parameters with respect to which the loss is differentiated.
      model_state: Model state before the microbatch.
      axis_name: Axes over which devices have weights of their own.

    Returns:
      What the microbatch adds to the message, the model state after it, and which
      leaves of the model state the loss function has returned unchanged. If the weight
      is 0, averaged leaves stay as they were.
    """
    of_params = functools.partial(full, batch=batch, model_state=model_state, rng=rng)
    loss, vjp, returned = jax.vjp(of_params, params, has_aux=True)
    weight, metrics, after = returned.weight, returned.metrics, returned.model_state
    # The largest float16 is 65,504. A loss times its number of tokens may exceed it.
    wide = loss.astype(working_dtype(loss.dtype))
    if weight is None:
        (gradients,) = vjp(jnp.ones_like(loss))
        # Without this, XLA may sum whole gradients on every device of a group.
        gradients = constrained(gradients, specs)
        return Contribution(gradients, wide, metrics, None), after, returned.unchanged
    empty, talks = weight == 0, collective_axes(of_params, params)
    if shared := tuple(name for name in axes(axis_name) if name in talks):
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
    gradients = constrained(gradients, specs)
    wide, metrics = _times(weight, (wide, metrics), empty)
    after = jax.tree.map(
        lambda a, b: jnp.where(empty, b, a) if averaged(b) else a, after, model_state
    )
    return Contribution(gradients, wide, metrics, weight), after, returned.unchanged


def combined(gradients: optax.Updates, each: Contribution) -> Contribution:
    """Returns what m microbatches add: their mean, or their sum if there are weights.

    Args:
      each: Loss, metrics and weight of every microbatch, with a leading axis of length
        m.
    """
    if each.weight is not None:
        sums = jax.tree.map(lambda x: x.sum(axis=0), each)
        return sums._replace(gradients=gradients)
    means = jax.tree.map(lambda x: x.mean(axis=0), each)
    count = each.loss.shape[0]
    return means._replace(gradients=jax.tree.map(lambda g: g / count, gradients))


def _times(weight: jax.Array, tree: Tree, nothing: jax.Array) -> Any:
    """Multiplies arrays by a weight; sets to 0, even if NaN, what `nothing` selects."""

    def times(x: jax.Array) -> jax.Array:
        wide = working_dtype(x.dtype)
        product = x.astype(wide) * weight.astype(wide)
        return jnp.where(nothing, 0, product).astype(x.dtype)

    return jax.tree.map(times, tree)

"""What one microbatch adds to a device's message, multiplied by its weight.

With `L_j` the loss of device j, `W_j` its weight and `v_i` the parameters of device i:

  `G_i = d/dv_i sum_j W_j L_j`

- a loss without collectives: `L_j` depends on `v_j` alone, so that
  `G_i = W_i dL_i/dv_i`
- a loss with a collective, such as batch normalization over all devices: every loss
  depends on all `v_i`, and its gradient must know the weights before it is exchanged.
  Each device differentiates `W_j / W L_j` with the largest weight W, and multiplies by
  W: dtypes of small range need not hold a number of tokens
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.executors import collective_axes
from pipejax.mesh import AxisName, axes
from pipejax.vectors import working_dtype

from ._loss import Loss, Returned


class Part(NamedTuple):
    """What one microbatch, or all of them, add to a message.

    Attributes:
      gradients: pytree like the parameters; times the weight, if there is one.
      loss: scalar, likewise.
      metrics: pytree of scalars, likewise.
      weight: float32 scalar; `None` without weights.
    """

    gradients: Any
    loss: jax.Array
    metrics: Any
    weight: jax.Array | None


def part_of(
    full: Loss, params: Any, *inputs: Any, axis_name: AxisName
) -> tuple[Part, Returned]:
    """Runs the loss in its full form and its gradient.

    Args:
      full: `(params, *inputs) -> loss, Returned`.
      params: to differentiate with respect to.
      *inputs: batch, model state and key.
      axis_name: the axes over which devices have weights of their own.

    Returns:
      What it adds, and what the loss function returned.
    """
    loss, vjp, returned = jax.vjp(lambda p: full(p, *inputs), params, has_aux=True)
    weight, metrics = returned.weight, returned.metrics
    # float16 ends at 65,504: a loss times its tokens may be more.
    wide = loss.astype(working_dtype(loss.dtype))
    if weight is None:
        (gradients,) = vjp(jnp.ones_like(loss))
        return Part(gradients, wide, metrics, None), returned
    empty, talks = weight == 0, collective_axes(full, params, *inputs)
    if shared := tuple(name for name in axes(axis_name) if name in talks):
        most = lax.pmax(weight, shared)
        (gradients,) = vjp((weight / jnp.where(most == 0, 1, most)).astype(loss.dtype))
        # Without a weight here, what is finite are derivatives of the others' losses.
        gradients = jax.tree.map(
            lambda g: _times(most, g, empty & ~jnp.isfinite(g)), gradients
        )
    else:
        (gradients,) = vjp(jnp.ones_like(loss))
        gradients = _times(weight, gradients, empty)
    wide, metrics = _times(weight, (wide, metrics), empty)
    return Part(gradients, wide, metrics, weight), returned


def together(gradients: Any, each: Part) -> Part:
    """Returns what m microbatches add: their mean, or with weights their sum.

    Args:
      gradients: their sum.
      each: loss, metrics and weight of every microbatch, leading axis m.
    """
    if each.weight is not None:
        sums = jax.tree.map(lambda x: x.sum(axis=0), each)
        return sums._replace(gradients=gradients)
    means = jax.tree.map(lambda x: x.mean(axis=0), each)
    count = each.loss.shape[0]
    return means._replace(gradients=jax.tree.map(lambda g: g / count, gradients))


def _times(weight: jax.Array, tree: Any, nothing: jax.Array) -> Any:
    """Multiplies by the weight; what counts for nothing may be NaN and becomes 0."""

    def times(x: jax.Array) -> jax.Array:
        wide = working_dtype(x.dtype)
        product = x.astype(wide) * weight.astype(wide)
        return jnp.where(nothing, 0, product).astype(x.dtype)

    return jax.tree.map(times, tree)

"""A learning rate in inverse proportion to the age of gradients."""

import optax

from pipejax._core.checks import check_width


def scale_by_staleness(width: int) -> optax.GradientTransformation:
    r"""Divides updates by the width of the pipeline.

    $$update(d) = d / K$$

    Under a plain delay, SGD with learning rate eta is stable up to the curvature

    $$2 \sin(\pi / (4 K - 2)) / \eta$$

    Dividing updates by K restores the stability that SGD has at K=1: completely at K=2,
    and to at least a share of `pi / 4` at larger widths. The price is that the
    parameters move at one K-th of the speed. For SGD with momentum the division is not
    enough, because momentum loses far more than a factor K of its stability under a
    delay (`pj.stability`). `delay_robust` is made for that case.

    Args:
      width: Pipeline width K, at least 1. A gradient is applied K-1 updates after the
        parameters it was taken at.

    Returns:
      An `optax.GradientTransformation` without a state. Put it after an optimizer.

    Raises:
      ValueError: If `width` is not an integer of at least 1.

    Examples:
      >>> import jax.numpy as jnp, pipejax as pj
      >>> tx = pj.corrections.scale_by_staleness(4)
      >>> update, _ = tx.update(jnp.array(8.0), tx.init(jnp.array(0.0)))
      >>> print(f"{update:.1f}")
      2.0

    References:
      Zhang et al., Staleness-aware Async-SGD, 2016, https://arxiv.org/abs/1511.05950
    """
    return optax.scale(1 / check_width(width))

"""A learning rate in proportion to how old gradients are."""

import optax

from pipejax.train_step import check_width


def scale_by_staleness(width: int) -> optax.GradientTransformation:
    """Divides updates by the pipeline's width: `update(d) = d / width`.

    Plain SGD at learning rate eta is stable up to a curvature of
    `2 sin(pi / (4 K - 2)) / eta`, so dividing by K keeps all of what it was at K=1 at
    K=2, and at least `pi / 4` of it beyond, for a K-th of the speed. With momentum it
    does not: that loses far more than a factor K (`pj.stability`).

    Args:
      width: pipeline width K, at least 1; a gradient is applied K - 1 updates after
        the parameters it was taken at.

    Returns:
      A transformation, to be put after an optimizer.

    Raises:
      ValueError: if `width` is not an integer of at least 1.

    Reference: Zhang et al., Staleness-aware Async-SGD, 2016,
      https://arxiv.org/abs/1511.05950
    """
    return optax.scale(1 / check_width(width))

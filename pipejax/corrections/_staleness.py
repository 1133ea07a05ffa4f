"""A learning rate in proportion to how old gradients are."""

import optax

from pipejax.train_step import check_width


def scale_by_staleness(width: int) -> optax.GradientTransformation:
    """Divides updates by the pipeline's width: `update(d) = d / width`.

    Plain SGD at learning rate eta is stable up to a curvature of about
    `pi / (2 K - 1) / eta`, so dividing by K keeps what it was at `width=1`, for a K-th
    of the speed. With momentum it does not: that loses far more than a factor K
    (`pj.stability`).

    Args:
      width: pipeline width K, at least 1; a gradient is applied K updates after the
        parameters it was taken at had been reached.

    Returns:
      A transformation, to be put after an optimizer.

    Raises:
      ValueError: if `width` is not an integer of at least 1.

    Reference: Zhang et al., Staleness-aware Async-SGD, 2016,
      https://arxiv.org/abs/1511.05950
    """
    return optax.scale(1 / check_width(width))

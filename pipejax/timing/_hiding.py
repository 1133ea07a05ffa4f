"""Calculates what pipelining gains at most, and what it takes to hide an exchange."""

import dataclasses
import math

from pipejax._core.checks import check_flag
from pipejax._internal.integers import is_integer

from ._exchange import Duration
from ._iteration import (
    Compute,
    overlapped_step_time,
    sharded_step_time,
    synchronous_step_time,
)


def ceilings(
    compute: Compute, exchange: Duration, *, shard_optimizer: bool = False
) -> dict[str, float]:
    r"""Returns the largest speedups that pipelining can have over synchronous steps.

    With c the compute time, x the exchange time, and f, b and u the seconds of forward
    pass, backward pass and update, the speedups of a step of `max(c, x)` seconds over a
    synchronous step and over an overlapped one are

    $$(c + x) / \max(c, x)$$

    $$(f + \max(b, x) + u) / \max(c, x)$$

    The first is at most 2. The second is at most 4/3 if the backward pass takes two
    thirds of c.

    Args:
      compute: The compute times of a step; c is `compute.total`.
      exchange: The exchange of a gradient; x is `exchange.total`.
      shard_optimizer: Whether `sharded_step_time` takes the place of `max(c, x)`.

    Returns:
      The speedups, under the keys `"synchronous"` and `"overlapped"`.

    Raises:
      ValueError: If neither the compute nor the exchange takes time.

    Examples:
      >>> import pipejax as pj
      >>> exchange = pj.timing.Duration(0, 0.75, 0, 0, 0)  # 0.75 s on the wire
      >>> gains = pj.timing.ceilings(pj.timing.Compute(0.25, 0.5), exchange)
      >>> {name: round(gain, 3) for name, gain in gains.items()}
      {'synchronous': 2.0, 'overlapped': 1.333}
    """
    best = max(compute.total, exchange.total)
    if not best:
        raise ValueError(
            "`compute` or `exchange` must take time, got 0 seconds for both. Give the"
            " times of a step."
        )
    if shard_optimizer:
        best = sharded_step_time(compute, exchange)
    waits = dataclasses.replace(compute, inside=0.0)  # without predictions
    return {
        "synchronous": synchronous_step_time(waits, exchange) / best,
        "overlapped": overlapped_step_time(waits, exchange) / best,
    }


def least_delayed_share(compute: Compute, exchange: Duration) -> float:
    r"""Returns the smallest share of bytes whose delay hides an exchange at width 2.

    With f, b and u the seconds of forward pass, backward pass and update, and x the
    exchange time, the exchange of the delayed share d runs first, for d x. The other
    bytes follow as the backward pass computes them, from f on. All are exchanged when
    the compute ends if `x <= f + b + u` and

    $$f + (1 - d) x <= f + b + u$$

    The backward pass is assumed to compute gradients at a constant rate, and the update
    to need each of them at its end only.

    Args:
      compute: The compute times f, b and u of a step.
      exchange: The exchange of a gradient; x is `exchange.total`.

    Returns:
      The share d, in [0, 1]. It is 1 if the compute cannot hide the exchange.

    Examples:
      An exchange that takes as long as the compute needs a delay of a third of its
      bytes. One that takes two thirds of the compute needs none:

      >>> import pipejax as pj
      >>> compute = pj.timing.Compute.of(3.0)
      >>> exchange = pj.timing.Duration(0, 3.0, 0, 0, 0)  # 3 s on the wire
      >>> round(pj.timing.least_delayed_share(compute, exchange), 3)
      0.333
      >>> pj.timing.least_delayed_share(compute, pj.timing.Duration(0, 2.0, 0, 0, 0))
      0.0
    """
    total = exchange.total
    if total > compute.total:
        return 1.0
    after_forward = compute.total - compute.forward
    return max(0.0, 1 - after_forward / total) if total else 0.0


def batch_to_hide(
    compute: Compute,
    exchange: Duration,
    width: int = 2,
    *,
    weight_prediction: bool = True,
    one_core: bool = False,
    shard_optimizer: bool = False,
) -> float:
    r"""Returns the smallest factor on the batch size that hides the exchange.

    Forward and backward pass take m times as long for m times as many examples. The
    update and the exchange take as long as before. At width K with weight prediction,
    the smallest m that hides the exchange solves

    $$m (f + b) + i + K u + d = x$$

    with f, b and u the seconds of forward pass, backward pass and update, i those of
    the mean inside the host (`Compute.inside`), x the exchange time, and d the seconds
    that codec and additions take on the core that computes the model (0 without
    `one_core`). A smaller batch can grow at no cost in time. With a larger batch the
    link idles. With a sharded optimizer, each half of the exchange hides behind one of
    the passes (`sharded_step_time`):

    $$2 m \min(f, b) = x$$

    Args:
      compute: The compute times f, b and u of a step with the current batch.
      exchange: The exchange of a gradient; x is `exchange.total`, and d is
        `exchange.computed`.
      width: The width K, at least 2.
      weight_prediction: Whether each step predicts the weights K - 1 updates ahead. If
        not, u counts once instead of K times.
      one_core: Whether the codec and the additions run on the core that computes the
        model, as on a CPU.
      shard_optimizer: Whether every device updates a share of the parameters. With
        `one_core`, it changes nothing, because the host executor runs the step.

    Returns:
      The factor m. It is at most 1 if the current batch hides the exchange, 0 if every
      batch hides it, and infinite if the passes take no time.

    Raises:
      ValueError: If `width` is not a whole number of at least 2, or a flag is
        not a bool.

    Examples:
      >>> import pipejax as pj
      >>> exchange = pj.timing.Duration(0, 3.0, 0, 0, 0)  # 3 s on the wire
      >>> pj.timing.batch_to_hide(pj.timing.Compute(0.25, 0.5), exchange)
      4.0
    """
    if not is_integer(width, 2):
        raise ValueError(
            f"`width` must be a whole number of at least 2, got {width!r}. At width 1"
            " no exchange is hidden."
        )
    check_flag("weight_prediction", weight_prediction)
    check_flag("one_core", one_core)
    check_flag("shard_optimizer", shard_optimizer)
    # One update of the step itself, and K - 1 updates of the prediction.
    updates = (width if weight_prediction else 1) * compute.update
    also = compute.inside + (exchange.computed if one_core else 0.0)
    left = exchange.total - updates - also
    passes = compute.forward + compute.backward
    if shard_optimizer and not one_core:
        left, passes = exchange.total, 2 * min(compute.forward, compute.backward)
    # The parts that do not grow with the batch already take as long as the exchange.
    if left <= 0:
        return 0.0
    return left / passes if passes else math.inf

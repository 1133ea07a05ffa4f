"""How long a training step takes, by how it exchanges gradients.

With `c` compute and `x` exchange:

- synchronous: `c + x`; overlapped with the backward pass, `forward + max(backward, x)`
  at best, and a little more with buckets
- Pipe-SGD: `max(c, x)`: at most 2 times as fast as the first, 4/3 as the second; its
  weight prediction adds an update to `c`

Reference: Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619
"""

import dataclasses
import math

from pipejax.integers import is_integer

from ._cluster import Cluster, check_seconds
from ._counts import FLOAT32
from ._exchange import Duration


@dataclasses.dataclass(frozen=True)
class Compute:
    """Seconds that a device computes in a step.

    Attributes:
      forward: pass, with the loss.
      backward: pass.
      update: of parameters and optimizer state.

    Raises:
      ValueError: for one below 0.
    """

    forward: float
    backward: float
    update: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_seconds(field.name, getattr(self, field.name))

    @classmethod
    def of(cls, seconds: float, update: float = 0.0) -> "Compute":
        """Forward and backward together, the second twice the first."""
        return cls(seconds / 3, 2 * seconds / 3, update)

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.update


def synchronous(compute: Compute, exchange: Duration) -> float:
    """D-Sync, or PS-Sync, by whose exchange it is: `c + x`."""
    return compute.total + exchange.total


def overlapped(compute: Compute, exchange: Duration) -> float:
    """D-Sync at its best, all of it beside the backward pass: `f + max(b, x) + u`.

    No bucket is ready before some of the pass is done, so this is not reached.
    """
    beside = max(compute.backward, exchange.total)
    return compute.forward + beside + compute.update


def bucketed(compute: Compute, exchange: Duration, buckets: int) -> float:
    """D-Sync with B buckets, each exchanged as soon as the backward pass has made it.

    `f + max(b / B + B x, b + x) + u`: either the link is never idle after the first is
    there, or the last waits for nothing but itself. `B = 1` is `synchronous`.

    Args:
      compute: of a step; its backward pass makes a B-th of the gradient in a B-th of
        its time.
      exchange: of one bucket.
      buckets: B.

    Raises:
      ValueError: for fewer than one.
    """
    if not is_integer(buckets, 1):
        raise ValueError(f"`buckets` must be a whole number above 0, got {buckets!r}.")
    busy = compute.backward / buckets + buckets * exchange.total
    last = compute.backward + exchange.total
    return compute.forward + max(busy, last) + compute.update


def pipelined(
    compute: Compute,
    exchange: Duration,
    width: int = 2,
    *,
    weight_prediction: bool = True,
    one_core: bool = False,
) -> float:
    """Pipe-SGD at width K: `c + x` at 1, `max(c + (K - 1) u, x)` above.

    Two resources, compute and network, are busy at width 2; a larger one helps only
    against times that vary.

    Args:
      compute: of a step.
      exchange: of a gradient.
      width: K.
      weight_prediction: whether each step also looks K - 1 updates ahead, which is
        `pj.make_train_step`'s default; without it `max(c, x)`.
      one_core: whether codec and sums run where the model does, and so add to it.

    Raises:
      ValueError: for a width below 1.
    """
    if not is_integer(width, 1):
        raise ValueError(f"`width` must be a whole number above 0, got {width!r}.")
    if width == 1:
        return synchronous(compute, exchange)
    also = exchange.computed if one_core else 0.0
    ahead = (width - 1) * compute.update if weight_prediction else 0.0
    return max(compute.total + ahead + also, exchange.total)


def asynchronous(cluster: Cluster, compute: Compute, n: int) -> float:
    """PS-Async: seconds in which every worker has had one gradient applied.

    A worker pulls n parameters, computes, pushes n gradients, and waits for no other.
    The server's link carries both of each worker; it adds each gradient.

    `max(c + 2(alpha + n beta), (p - 1) n beta, (p - 1) n gamma)`, the server a worker
    too. Its gradients are of parameters that other workers have changed since, p-1
    times on average.

    Args:
      cluster: with one device a host.
      compute: of a step.
      n: elements of a gradient.
    """
    size, others = FLOAT32 * n, cluster.hosts - 1
    alone = compute.total
    if others:
        alone += 2 * (cluster.link.latency + size / cluster.link.bandwidth)
    return max(
        alone,
        others * size / cluster.link.bandwidth,
        others * size / cluster.reduction,
    )


def ceilings(compute: Compute, exchange: Duration) -> dict[str, float]:
    """The most that pipelining can gain, over each way to be synchronous.

    `(c + x) / max(c, x)`, at most 2; `(f + max(b, x) + u) / max(c, x)`, at most 4/3
    where the backward pass takes two thirds.
    """
    best = max(compute.total, exchange.total)
    return {
        "synchronous": synchronous(compute, exchange) / best,
        "overlapped": overlapped(compute, exchange) / best,
    }


def batch_to_hide(
    compute: Compute,
    exchange: Duration,
    width: int = 2,
    *,
    weight_prediction: bool = True,
    one_core: bool = False,
) -> float:
    """How many times the batch size hides the exchange, at the least.

    With `f` and `b` the passes, `u` the update and `d` what a codec computes on the
    model's own core (0 without `one_core`), the m of

      `m (f + b) + K u + d = x`

    where the passes take m times as long for m times the examples, and `u`, `d` and
    the exchange `x` as long as before. Below it a step takes `x`, so that a larger
    batch costs no time; above it the link idles.

    Args:
      compute: of a step with the batch at hand.
      exchange: of a gradient.
      width: K, at least 2.
      weight_prediction: as of `pipelined`; without it `u` counts once.
      one_core: as of `pipelined`.

    Returns:
      m: at most 1 if the exchange is hidden as it is, 0 if any batch hides it, and
      infinite for passes that take no time.

    Raises:
      ValueError: for a width that hides nothing.
    """
    if not is_integer(width, 2):
        raise ValueError(
            f"`width` must be a whole number of at least 2, got {width!r}: at 1 no"
            " exchange is hidden."
        )
    updates = (width if weight_prediction else 1) * compute.update
    left = exchange.total - updates - (exchange.computed if one_core else 0.0)
    passes = compute.forward + compute.backward
    if left <= 0:
        return 0.0
    return left / passes if passes else math.inf


def efficiency(alone: float, step: float) -> float:
    """Of p devices' samples a second, the share of p times those of one: `t_1 / t_p`.

    Args:
      alone: seconds of a step on one device, which exchanges nothing.
      step: seconds of a step of all, each with as large a batch.
    """
    return alone / step

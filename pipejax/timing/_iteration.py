"""The time of a training step in closed form, for each way to exchange gradients.

Let a step compute for c seconds and exchange gradients for x seconds. Pipe-SGD at width
2 takes `max(c, x)`. It is at most 2 times as fast as a step that computes and then
exchanges, `c + x`, and at most 4/3 times as fast as one that overlaps the exchange with
a backward pass of two thirds of c.
"""

import dataclasses

from pipejax._core.checks import check_flag
from pipejax._internal.integers import is_integer

from ._checks import check_count, check_seconds, store
from ._exchange import Duration


@dataclasses.dataclass(frozen=True)
class Compute:
    """The seconds that a device computes in one step, split by what it computes.

    Attributes:
      forward: Seconds of the forward pass, including the loss.
      backward: Seconds of the backward pass.
      update: Seconds to update the parameters and the optimizer state.
      inside: Seconds to average gradients inside the host, after the backward pass.

    Raises:
      ValueError: If a time is negative or not finite.
    """

    forward: float
    backward: float
    update: float = 0.0
    inside: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            seconds = check_seconds(field.name, getattr(self, field.name))
            store(self, **{field.name: seconds})

    @classmethod
    def of(cls, seconds: float, update: float = 0.0) -> "Compute":
        """Splits the time of both passes: one third forward, two thirds backward.

        Args:
          seconds: Seconds of the forward and the backward pass together.
          update: Seconds to update the parameters and the optimizer state.
        """
        seconds = check_seconds("seconds", seconds)
        # For each product of the forward pass, the backward pass has two: one for the
        # gradient of the input, and one for that of the weights.
        return cls(seconds / 3, 2 * seconds / 3, update)

    def sharded(self, devices: int) -> "Compute":
        """Returns the times of one of some devices that share the update equally."""
        shares = check_count("devices", devices)
        return dataclasses.replace(self, update=self.update / shares)

    def averaging(self, seconds: float) -> "Compute":
        """Returns the times of a step that also averages gradients inside its host.

        Nothing is counted as hidden: the gradients of layers in a loop are known only
        when it ends.

        Args:
          seconds: Seconds of the mean, as `mean_inside_hosts` returns them.
        """
        return dataclasses.replace(self, inside=seconds)

    @property
    def after(self) -> float:
        """The seconds that the device computes after the backward pass."""
        return self.inside + self.update

    @property
    def total(self) -> float:
        """The seconds that the device computes in one step."""
        return self.forward + self.backward + self.after


def synchronous_step_time(
    compute: Compute, exchange: Duration, buckets: int = 1
) -> float:
    r"""Returns the seconds of a synchronous step that exchanges B buckets of gradients.

    Each bucket is exchanged as soon as the backward pass has computed it and the bucket
    before it is exchanged. With f, b and u the seconds of forward pass, backward pass
    and update, and x the time to exchange one bucket,

    $$t = f + \max(b / B + B x, b + x) + u$$

    The first term of the maximum is a link that is always busy after the first bucket.
    The second term is a last bucket that waits for the backward pass only. With one
    bucket, the step computes and then exchanges. The paper calls this PS-Sync if the
    exchange uses a parameter server, and D-Sync if it uses a decentralized all-reduce.
    With many buckets, t approaches `overlapped_step_time`, until the latencies of all
    the buckets outweigh the gain.

    Args:
      compute: The compute times f, b and u of a step. The backward pass is assumed to
        compute each bucket in the same time, `b / B`.
      exchange: The exchange of one bucket; x is `exchange.total`.
      buckets: The number B of equal buckets.

    Raises:
      ValueError: If `buckets` is not a whole number above 0.

    Examples:
      >>> import pipejax as pj
      >>> compute = pj.timing.Compute(0.25, 0.5)
      >>> exchange = pj.timing.Duration(0, 0.5, 0, 0, 0)  # 0.5 s on the wire
      >>> pj.timing.synchronous_step_time(compute, exchange)
      1.25
      >>> bucket = pj.timing.Duration(0, 0.125, 0, 0, 0)
      >>> pj.timing.synchronous_step_time(compute, bucket, 4)
      0.875

    References:
      Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619

      Li et al., PyTorch Distributed, 2020, https://arxiv.org/abs/2006.15704
    """
    check_buckets(buckets)
    # The link waits for the first bucket, and is never idle after that.
    busy = compute.backward / buckets + buckets * exchange.total
    # The link keeps up with the backward pass, so the last bucket starts at its end.
    last = compute.backward + exchange.total
    return compute.forward + max(busy, last) + compute.after


def check_buckets(buckets: int) -> None:
    """Raises a `ValueError` unless the number of buckets is a whole number above 0."""
    if not is_integer(buckets, 1):
        raise ValueError(
            f"`buckets` must be a whole number above 0, got {buckets!r}. 1 exchanges"
            " the whole gradient at once."
        )


def overlapped_step_time(compute: Compute, exchange: Duration) -> float:
    r"""Returns a lower bound for a synchronous step that overlaps its exchange.

    With f, b and u the seconds of forward pass, backward pass and update, and x the
    exchange time,

    $$t = f + \max(b, x) + u$$

    A real step takes longer, because no gradient is ready at the start of the backward
    pass; see `synchronous_step_time` with buckets.

    Args:
      compute: The compute times f, b and u of a step.
      exchange: The exchange of a gradient; x is `exchange.total`.

    References:
      Li et al., PyTorch Distributed, 2020, https://arxiv.org/abs/2006.15704
    """
    beside = max(compute.backward, exchange.total)
    return compute.forward + beside + compute.after


def pipelined_step_time(
    compute: Compute,
    exchange: Duration,
    width: int = 2,
    *,
    weight_prediction: bool = True,
    one_core: bool = False,
) -> float:
    r"""Returns the seconds of a step of Pipe-SGD at width K.

    With c the compute time, u the time of an update, and x the exchange time, a step
    with weight prediction takes

    $$t = \max(c + (K - 1) u, x)$$

    at widths above 1. At width 1 it is `synchronous_step_time`. A width of 2 already
    keeps both compute and network busy. A larger width helps only against times that
    vary from step to step; see `pj.timing.simulate`.

    Args:
      compute: The compute times of a step; c is `compute.total` and u is
        `compute.update`.
      exchange: The exchange of a gradient; x is `exchange.total`.
      width: The width K.
      weight_prediction: Whether each step predicts the weights K - 1 updates ahead, as
        `pj.make_train_step` does by default. Without it, t is `max(c, x)`.
      one_core: Whether the codec and the additions run on the core that computes the
        model, as on a CPU. They then also count as compute: `exchange.computed` is
        added to c.

    Raises:
      ValueError: If `width` is not a whole number above 0, or a flag is not a bool.

    References:
      Li et al., Pipe-SGD, 2018, https://arxiv.org/abs/1811.03619

    Examples:
      >>> import pipejax as pj
      >>> exchange = pj.timing.Duration(0, 0.5, 0, 0, 0)  # 0.5 s on the wire
      >>> pj.timing.pipelined_step_time(pj.timing.Compute(0.25, 0.5), exchange)
      0.75
    """
    if not is_integer(width, 1):
        raise ValueError(f"`width` must be a whole number above 0, got {width!r}.")
    check_flag("weight_prediction", weight_prediction)
    check_flag("one_core", one_core)
    if width == 1:
        return synchronous_step_time(compute, exchange)
    # A core that encodes and adds cannot compute the model meanwhile. The rest of the
    # exchange still runs beside the model.
    also = exchange.computed if one_core else 0.0
    # The step itself updates once, which `compute.total` has.
    ahead = (width - 1) * compute.update if weight_prediction else 0.0
    return max(compute.total + ahead + also, exchange.total)


def sharded_step_time(compute: Compute, exchange: Duration) -> float:
    r"""Returns the seconds of a step at width 2 with a sharded optimizer.

    The update runs between the two halves of the exchange. The reduce-scatter therefore
    runs beside the forward pass, and the all-gather beside the backward pass. With f, b
    and u the seconds of forward pass, backward pass and update, and x the exchange
    time,

    $$t = \max(f, x / 2) + \max(b, x / 2) + 2 u$$

    The second u is the update of the prediction. This is the step of the fused
    executor. With the host executor, a step takes `pipelined_step_time`.

    Args:
      compute: The compute times f, b and u of a step, with the update of one device.
      exchange: The exchange of a gradient; x is `exchange.total`.

    References:
      Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054
    """
    half = exchange.total / 2
    passes = max(compute.forward, half) + max(compute.backward, half)
    return passes + compute.after + compute.update

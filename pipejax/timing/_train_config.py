"""Ways to train, and the step times that they should have."""

from typing import Any, NamedTuple

from pipejax.codecs import Codec

from ._checks import check_elements
from ._cluster import Cluster
from ._counts import encodings
from ._exchange import Duration, duration, flat, hierarchical, mean_inside_hosts
from ._iteration import (
    Compute,
    check_buckets,
    pipelined_step_time,
    sharded_step_time,
    synchronous_step_time,
)
from ._local_step_time import local_step_time
from ._rounds import Algorithm

_SLOPES = 1.25
"""Bytes of parameters with slopes of 8 bits, over those of parameters."""


def of_halves(first: Duration, second: Duration, *, slopes: bool) -> Duration:
    """Returns an exchange of the first half of one, and the second of another.

    With `slopes`, the second half also moves a slope of 8 bits for each parameter.
    """
    more = _SLOPES if slopes else 1.0
    longer = second._replace(wire=more * second.wire, codec=more * second.codec)
    found = Duration(*((a + b) / 2 for a, b in zip(first, longer, strict=True)))
    return found._replace(reduction=first.reduction)  # all of it is in the first half


class TrainConfig(NamedTuple):
    """A way to train: width, algorithm, codec, number of buckets, and local steps.

    Attributes:
      width: The width K; 1 is synchronous.
      algorithm: The name of the all-reduce algorithm in `pj.collectives`. If `levels`
        is true, it runs between hosts.
      codec: The name of the codec in `Cluster.codecs`; `None` sends float32.
      levels: Whether the all-reduce is `hierarchical`, first inside hosts and then
        between them.
      buckets: The number of equal parts in which the gradient is exchanged.
      sync_every: The number H of local steps of a round. 0 stands for no local steps.
      overlap_steps: The number V of steps that hide the exchange of a round.
      shard_optimizer: Whether every device keeps and updates a share of the parameters.
    """

    width: int
    algorithm: Algorithm
    codec: str | None = None
    levels: bool = False
    buckets: int = 1
    sync_every: int = 0
    overlap_steps: int = 0
    shard_optimizer: bool = False

    def exchange(
        self, cluster: Cluster, elements: int, codec: Codec | None
    ) -> Duration:
        """Returns how long the exchange of one bucket takes.

        With a sharded optimizer, the codec encodes the first half, in which gradients
        travel, and not the second, in which parameters do.

        Args:
          cluster: The cluster with its speeds. A single device exchanges nothing.
          elements: The number of float32 elements of the whole gradient.
          codec: The codec with the name `self.codec`, or `None`.

        Raises:
          ValueError: If the codec has no speed in `cluster.codecs`, the algorithm is
            not a key of `pj.timing.COST_MODELS`, or `elements` or `self.buckets` is not
            a whole number above 0.
        """
        elements = check_elements("elements", elements)
        check_buckets(self.buckets)
        if cluster.hosts * cluster.devices == 1:
            return Duration(0, 0, 0, 0, 0)
        counted = hierarchical if self.levels else flat
        n = -(-elements // self.buckets)
        first = duration(
            cluster, counted(cluster, self.algorithm, n, codec), self.codec
        )
        if not self.shard_optimizer:
            return first
        second = duration(cluster, counted(cluster, self.algorithm, n, None))
        return of_halves(first, second, slopes=self.width > 1)

    def encodings(self, cluster: Cluster, elements: int, codec: Codec | None) -> int:
        """Returns how many times in turn a value of a gradient is encoded, at most.

        Args:
          cluster: The cluster, for its number of hosts and devices.
          elements: The number of float32 elements of the gradient.
          codec: The codec with the name `self.codec`, or `None`.
        """
        p = cluster.hosts if self.levels else cluster.hosts * cluster.devices
        return encodings(self.algorithm, p, elements, codec)

    def predicts_by_host(self, cluster: Cluster, *, one_core: bool = False) -> bool:
        """Returns whether the devices of a host predict by their mean gradient.

        They do in two levels, and with `psum` over two axes, if there are several hosts
        of several devices. The processes of a host that are CPUs do not.

        Args:
          cluster: The cluster, for its number of hosts and devices.
          one_core: Whether a device is a process on a CPU.
        """
        if self.width == 1 or one_core or 1 in (cluster.hosts, cluster.devices):
            return False
        return self.levels or (self.algorithm == "psum" and not self.shard_optimizer)

    def own(
        self,
        compute: Compute,
        cluster: Cluster,
        elements: int,
        *,
        one_core: bool = False,
    ) -> Compute:
        """Returns the compute times of a step of this way.

        A sharded optimizer divides the update, and predictions by host need a mean.

        Args:
          compute: The compute times of a step on one device.
          cluster: The cluster with its speeds.
          elements: The number of float32 elements of the whole gradient.
          one_core: As for `predicts_by_host`.
        """
        if self.shard_optimizer:
            compute = compute.sharded(cluster.hosts * cluster.devices)
        if self.predicts_by_host(cluster, one_core=one_core):
            compute = compute.averaging(mean_inside_hosts(cluster, elements))
        return compute

    def step(
        self, compute: Compute, exchange: Duration, *, one_core: bool = False
    ) -> float:
        """Returns the seconds of a step.

        Width 1 is `synchronous_step_time`, a larger width `pipelined_step_time` with
        weight prediction, and local steps are `local_step_time`. Above width 1, a
        sharded optimizer has `sharded_step_time`, but with `one_core`, where the host
        executor runs the step, `pipelined_step_time`.

        Args:
          compute: The compute times of a step, as `own` returns them.
          exchange: The exchange of one bucket, as `exchange` returns it.
          one_core: Whether codec and additions run on the core that computes the model.
        """
        if self.sync_every:
            rounds = self.sync_every, self.overlap_steps
            return local_step_time(compute, exchange, *rounds, one_core=one_core)
        if self.width == 1:
            step = synchronous_step_time(compute, exchange, self.buckets)
            # Buckets are encoded and added beside the backward pass, by the same core.
            busy = compute.total + self.buckets * exchange.computed
            return max(step, busy) if one_core else step
        if self.shard_optimizer and not one_core:
            return sharded_step_time(compute, exchange)
        return pipelined_step_time(compute, exchange, self.width, one_core=one_core)

    def __str__(self) -> str:
        hidden = f"V = {self.overlap_steps}" if self.overlap_steps else "at once"
        parts = [
            f"H = {self.sync_every}, {hidden}"
            if self.sync_every
            else f"width {self.width}",
            f"hierarchical, {self.algorithm}" if self.levels else self.algorithm,
            self.codec or "uncompressed",
            *([f"{self.buckets} buckets"] if self.buckets > 1 else []),
        ]
        return ", ".join(parts)


class RankedConfig(NamedTuple):
    """A way to train, with the step time that it should have.

    Attributes:
      config: The way to train.
      exchange: How long the exchange of one bucket takes.
      step: The step time in seconds.
      compute: Seconds that the device computes in a step: `Compute.total`.
      d_sync: Seconds of a step of D-Sync with the fastest exchange without a codec:
        `pj.timing.synchronous_step_time`. `plan(..., baseline_bytes=2)` halves its
        bytes.
      overlapped: Seconds of the same step if it overlaps the exchange with the backward
        pass, at best: `pj.timing.overlapped_step_time`.
      dropped: The share of the gradient's bits that the codec drops.
      encodings: How many times in turn a value is encoded, at most.
      slack: The share of the compute that is left when the exchange is over; below 0 if
        it is exposed. `None` takes `1 - exchange / step`. With a sharded optimizer, it
        is the slack of the shorter pass and of half of the exchange.
      inside: Seconds of the step in which devices average their gradients inside hosts,
        to predict by them.
    """

    config: TrainConfig
    exchange: Duration
    step: float
    compute: float
    d_sync: float
    overlapped: float
    dropped: float = 0.0
    encodings: int = 0
    slack: float | None = None
    inside: float = 0.0

    @property
    def ratio(self) -> float:
        """The ratio `step / compute`; 1 if the exchange costs no time."""
        return _over(self.step, self.compute)

    @property
    def gains(self) -> dict[str, float]:
        """How many times as fast the step is as uncompressed D-Sync.

        The keys are those of `pj.timing.ceilings`, which has what pipelining alone can
        gain, without the algorithm and the codec.
        """
        return {
            "synchronous": _over(self.d_sync, self.step),
            "overlapped": _over(self.overlapped, self.step),
        }

    @property
    def reason(self) -> str:
        """An explanation of the step time, in words."""
        exchange = self.exchange.total * self.config.buckets
        largest = max(zip(self.exchange, self.exchange._fields, strict=True))[1]
        if self.config.sync_every:
            beside = "beside" if self.config.overlap_steps else "and waits for"
            return (
                f"computes {self.compute / self.step:.0%} of the time, {beside} an"
                f" exchange of {_ms(exchange)}, most of it {largest}"
            )
        if self.config.width == 1:
            waits = self.step - self.compute
            several = self.config.buckets > 1
            beside = ", the rest beside the backward pass" if several else ""
            return (
                f"waits {_ms(waits)} for an exchange of {_ms(exchange)}, most of it"
                f" {largest}{beside}"
            )
        longer, slack = self.step - self.compute, self.slack
        hidden = slack is not None and slack >= 0
        if slack is None:
            slack = 1 - exchange / self.step if self.step else 0.0
            # A step that is as long as its exchange may be longer than its compute.
            hidden = slack > 0 or not longer
        if hidden:
            more = f" that is {_ms(longer)} longer" if longer else ""
            return f"hidden behind compute{more}, {slack:.0%} slack"
        part = _ms(exchange - longer)
        return f"hides {part} of an exchange of {_ms(exchange)}: {largest}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the way, its times in seconds, gains and reason, as types of JSON."""
        return {
            **self.config._asdict(),
            "step": self.step,
            "exchange": self.exchange._asdict(),
            "gains": self.gains,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        gains = self.gains
        return (
            f"{self.config!s:<64}{_ms(self.step):>12}  {self.ratio:5.2f} x compute "
            f" gain {gains['synchronous']:.2f} ({gains['overlapped']:.2f}) "
            f" {self.reason}"
        )


def _over(a: float, b: float) -> float:
    return a / b if b else float("inf")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"

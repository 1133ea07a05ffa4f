"""One way to train: width, algorithm, codec and buckets, and how long its step is."""

from typing import NamedTuple

from pipejax.codecs import Codec

from ._cluster import Cluster
from ._counts import Algorithm
from ._exchange import Duration, duration, flat, hierarchical
from ._iteration import Compute, bucketed, pipelined


class Way(NamedTuple):
    """One way to train.

    Attributes:
      width: K.
      algorithm: of the all-reduce.
      codec: its name; `None` sends all bits.
      levels: whether it is hierarchical, the algorithm between hosts.
      buckets: in how many equal parts the gradient is exchanged.
    """

    width: int
    algorithm: Algorithm
    codec: str | None = None
    levels: bool = False
    buckets: int = 1

    def exchange(
        self, cluster: Cluster, elements: int, codec: Codec | None
    ) -> Duration:
        """How long it takes for one bucket; one device has nothing to exchange."""
        if cluster.hosts * cluster.devices == 1:
            return Duration(0, 0, 0, 0, 0)
        counted = hierarchical if self.levels else flat
        n = -(-elements // self.buckets)
        return duration(cluster, counted(cluster, self.algorithm, n, codec), self.codec)

    def step(self, compute: Compute, exchange: Duration, *, one_core: bool) -> float:
        """Seconds of a step, from those of one bucket's exchange."""
        if self.width == 1:
            return bucketed(compute, exchange, self.buckets)
        return pipelined(compute, exchange, self.width, one_core=one_core)

    def __str__(self) -> str:
        parts = [
            f"width {self.width}",
            f"hierarchical, {self.algorithm}" if self.levels else self.algorithm,
            self.codec or "all bits",
            *([f"{self.buckets} buckets"] if self.buckets > 1 else []),
        ]
        return ", ".join(parts)


class Choice(NamedTuple):
    """A way to train, and how long its step should take.

    Attributes:
      way: that.
      exchange: how long the exchange of one of its buckets takes.
      step: seconds of a step.
      compute: seconds of it that are computed.
    """

    way: Way
    exchange: Duration
    step: float
    compute: float

    @property
    def ratio(self) -> float:
        """`step / compute`: 1 if communication costs nothing."""
        return self.step / self.compute if self.compute else float("inf")

    @property
    def reason(self) -> str:
        """What the step time comes from."""
        exchange = self.exchange.total * self.way.buckets
        largest = max(zip(self.exchange, self.exchange._fields, strict=True))[1]
        if self.way.width == 1:
            waits = self.step - self.compute
            several = self.way.buckets > 1
            beside = ", the rest beside the backward pass" if several else ""
            return (
                f"waits {_ms(waits)} for an exchange of {_ms(exchange)}, most of it"
                f" {largest}{beside}"
            )
        if exchange <= self.compute:
            spare = 1 - exchange / self.compute if self.compute else 0.0
            return f"hidden behind compute, {spare:.0%} of it to spare"
        return f"hides {_ms(self.compute)} of an exchange of {_ms(exchange)}: {largest}"

    def __str__(self) -> str:
        return (
            f"{self.way!s:<58}{_ms(self.step):>12}  {self.ratio:5.2f} x compute "
            f" {self.reason}"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"

"""What to choose: width, algorithm, codec and buckets, by how long a step should take.

Buckets are for D-Sync beside the backward pass, a `pmean` for each in a step of one's
own. Above width 1 there is one: it has a whole step to be exchanged in.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipejax.codecs import Codec

from ._cluster import Cluster
from ._counts import FORMS, Algorithm, compatible
from ._exchange import Duration, duration, flat, hierarchical
from ._iteration import Compute, bucketed, efficiency, pipelined

HOSTS = tuple(2**i for i in range(13))  # to 4,096
# Two steps as long as each other within this are as good: the simpler one is taken.
SAME = 0.01


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
            f"{self.way!s:<50}{_ms(self.step):>12}  {self.ratio:5.2f} x compute "
            f" {self.reason}"
        )


def plan(
    cluster: Cluster,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    widths: Sequence[int] = (1, 2),
    buckets: Sequence[int] = (1, 4, 16),
    *,
    one_core: bool = False,
) -> list[Choice]:
    """Every way to train, the best first.

    Of those as fast as each other within 1 % first comes the one with the smaller
    width, fewer buckets, no codec, one level: what costs nothing is not to be given
    away.

    Args:
      cluster: its speeds, of each codec too.
      elements: of a gradient, float32.
      compute: of a step.
      codecs: to consider, by their names in `cluster.codecs`.
      widths: to consider.
      buckets: to consider at width 1.
      one_core: whether codecs run where the model does, as on a CPU.

    Raises:
      ValueError: for a codec whose speed is not known.
    """
    known = _known(codecs)
    several = cluster.devices > 1 and cluster.hosts > 1
    ways = [
        Way(width, algorithm, name, levels, count)
        for (name, codec), algorithm in itertools.product(known.items(), FORMS)
        if compatible(algorithm, codec)
        for levels in ((False, True) if several else (False,))
        for width in widths
        for count in (buckets if width == 1 else (1,))
    ]
    found = []
    for way in ways:
        exchange = way.exchange(cluster, elements, known[way.codec])
        step = way.step(compute, exchange, one_core=one_core)
        found.append(Choice(way, exchange, step, compute.total))
    return _ranked(found)


def scaling(
    cluster: Cluster,
    way: Way,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    hosts: Sequence[int] = HOSTS,
    *,
    one_core: bool = False,
) -> dict[int, float]:
    """Efficiency of a way to train by the number of hosts, each with as large a batch.

    Args:
      cluster: with whatever number of hosts.
      way: of one of `plan`'s choices.
      elements: of a gradient.
      compute: of a step.
      codecs: by name, as of `plan`; the way's own must be there.
      hosts: how many.
      one_core: as of `plan`.

    Raises:
      ValueError: for a way whose codec is not given.
    """
    known = _known(codecs)
    if way.codec not in known:
        raise ValueError(
            f"`codecs` must have that of the way, {way.codec!r}; got"
            f" {sorted(codecs or {})}. Give what `plan` was given."
        )
    curve = {}
    for count in hosts:
        many = dataclasses.replace(cluster, hosts=count)
        exchange = way.exchange(many, elements, known[way.codec])
        step = way.step(compute, exchange, one_core=one_core)
        curve[count] = efficiency(compute.total, step)
    return curve


def _known(codecs: Mapping[str, Codec] | None) -> dict[str | None, Codec | None]:
    """By name; none by `None`."""
    found: dict[str | None, Codec | None] = {None: None}
    found.update((codecs or {}).items())
    return found


def _ranked(choices: list[Choice]) -> list[Choice]:
    """By step time; of those that are the same, the simplest first."""

    def simplicity(choice: Choice) -> tuple[int, int, bool, bool, float]:
        way = choice.way
        coded = way.codec is not None
        return way.width, way.buckets, coded, way.levels, choice.exchange.total

    left, ranked = sorted(choices, key=lambda c: c.step), []
    while left:
        end = left[0].step * (1 + SAME)
        same = [choice for choice in left if choice.step <= end]
        ranked += sorted(same, key=simplicity)
        left = left[len(same) :]
    return ranked


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"

"""What to choose: every width, algorithm and codec, by how long a step should take."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipejax.codecs import Codec

from ._cluster import Cluster
from ._counts import FORMS, Algorithm, compatible
from ._exchange import Duration, Exchange, duration, flat, hierarchical
from ._iteration import Compute, efficiency, pipelined

HOSTS = tuple(2**i for i in range(13))  # to 4,096
# Two steps as long as each other within this are as good: the simpler one is taken.
SAME = 0.01


class Choice(NamedTuple):
    """One way to train, and how long its step should take.

    Attributes:
      width: K.
      algorithm: of the all-reduce.
      codec: its name; `None` sends all bits.
      levels: whether it is hierarchical, the algorithm between hosts.
      exchange: how long that takes.
      step: seconds of a step.
      compute: seconds of it that are computed.
    """

    width: int
    algorithm: Algorithm
    codec: str | None
    levels: bool
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
        exchange, compute = self.exchange.total, self.compute
        largest = max(zip(self.exchange, self.exchange._fields, strict=True))[1]
        if self.width == 1:
            return f"waits for the exchange, {_ms(exchange)}, most of it {largest}"
        if exchange <= compute:
            spare = 1 - exchange / compute if compute else 0.0
            return f"hidden behind compute, {spare:.0%} of it to spare"
        return f"hides {_ms(compute)} of an exchange of {_ms(exchange)}: {largest}"

    def __str__(self) -> str:
        name = f"hierarchical, {self.algorithm}" if self.levels else self.algorithm
        return (
            f"width {self.width}  {name:<32}{self.codec or 'all bits':<14}"
            f"{_ms(self.step):>12}  {self.ratio:5.2f} x compute  {self.reason}"
        )


def plan(
    cluster: Cluster,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    widths: Sequence[int] = (1, 2),
    *,
    one_core: bool = False,
) -> list[Choice]:
    """Every way to train, the best first.

    Of those as fast as each other within 1 % first comes the one with the smaller
    width, without a codec, over one level: what costs nothing is not to be given away.

    Args:
      cluster: its speeds, of each codec too.
      elements: of a gradient, float32.
      compute: of a step.
      codecs: to consider, by their names in `cluster.codecs`.
      widths: to consider.
      one_core: whether codecs run where the model does, as on a CPU.

    Raises:
      ValueError: for a codec whose speed is not known.
    """
    found = [
        _choice(cluster, algorithm, name, exchange, compute, width, levels, one_core)
        for name, codec in [(None, None), *(codecs or {}).items()]
        for algorithm in FORMS
        if compatible(algorithm, codec)
        for levels, exchange in _exchanges(cluster, algorithm, elements, codec)
        for width in widths
    ]
    return _ranked(found)


def scaling(
    cluster: Cluster,
    choice: Choice,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    hosts: Sequence[int] = HOSTS,
    *,
    one_core: bool = False,
) -> dict[int, float]:
    """Efficiency of a choice by the number of hosts, each with as large a batch.

    Args:
      cluster: with whatever number of hosts.
      choice: one of `plan`'s.
      elements: of a gradient.
      compute: of a step.
      codecs: by name, as of `plan`; the choice's own must be there.
      hosts: how many.
      one_core: as of `plan`.

    Raises:
      ValueError: for a choice whose codec is not given.
    """
    known: dict[str | None, Codec | None] = dict(
        [(None, None), *(codecs or {}).items()]
    )
    if choice.codec not in known:
        raise ValueError(
            f"`codecs` must have the choice's, {choice.codec!r}; got"
            f" {sorted(codecs or {})}. Give what `plan` was given."
        )
    curve = {}
    for count in hosts:
        many = dataclasses.replace(cluster, hosts=count)
        make = hierarchical if choice.levels else flat
        exchange = make(many, choice.algorithm, elements, known[choice.codec])
        seconds = duration(many, exchange, choice.codec)
        if count * cluster.devices == 1:
            seconds = Duration(0, 0, 0, 0, 0)
        step = pipelined(compute, seconds, choice.width, one_core=one_core)
        curve[count] = efficiency(compute.total, step)
    return curve


def _exchanges(
    cluster: Cluster, algorithm: Algorithm, elements: int, codec: Codec | None
) -> list[tuple[bool, Exchange]]:
    found = [(False, flat(cluster, algorithm, elements, codec))]
    if cluster.devices > 1 and cluster.hosts > 1:
        found.append((True, hierarchical(cluster, algorithm, elements, codec)))
    return found


def _choice(
    cluster: Cluster,
    algorithm: Algorithm,
    codec: str | None,
    exchange: Exchange,
    compute: Compute,
    width: int,
    levels: bool,
    one_core: bool,
) -> Choice:
    seconds = duration(cluster, exchange, codec)
    step = pipelined(compute, seconds, width, one_core=one_core)
    return Choice(width, algorithm, codec, levels, seconds, step, compute.total)


def _ranked(choices: list[Choice]) -> list[Choice]:
    """By step time; of those that are the same, the simplest first."""

    def simplicity(choice: Choice) -> tuple[int, bool, bool, float]:
        coded = choice.codec is not None
        return choice.width, coded, choice.levels, choice.exchange.total

    left, ranked = sorted(choices, key=lambda c: c.step), []
    while left:
        end = left[0].step * (1 + SAME)
        same = [choice for choice in left if choice.step <= end]
        ranked += sorted(same, key=simplicity)
        left = left[len(same) :]
    return ranked


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"

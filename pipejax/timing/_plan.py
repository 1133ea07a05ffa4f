"""What to choose: width, algorithm, codec and buckets, by how long a step should take.

Buckets are for D-Sync beside the backward pass, a `pmean` for each in a step of one's
own. Above width 1 there is one: it has a whole step to be exchanged in.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from pipejax.codecs import Codec

from ._cluster import Cluster
from ._counts import FLOAT32, FORMS, Piece, compatible
from ._iteration import Compute, efficiency
from ._leaves import Shapes, square_leaves
from ._way import Choice, Way

HOSTS = tuple(2**i for i in range(13))  # to 4,096
# Two steps as long as each other within this are as good: the simpler one is taken.
SAME = 0.01


def plan(
    cluster: Cluster,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    widths: Sequence[int] = (1, 2),
    buckets: Sequence[int] = (1, 4, 16),
    *,
    one_core: bool = False,
    leaves: Shapes | None = None,
) -> list[Choice]:
    """Ranks every way to train by its step time, the best first.

    Ways as fast as each other within 1 % are ranked by simplicity: a smaller width,
    fewer buckets, a codec that drops fewer bits, one level. Precision that costs
    nothing is not to be given away.

    Args:
      cluster: its speeds, of each codec too.
      elements: of a gradient, float32.
      compute: of a step.
      codecs: to consider, by their names in `cluster.codecs`.
      widths: to consider.
      buckets: to consider at width 1. A codec that needs whole leaves has one.
      one_core: whether codecs run where the model does, as on a CPU.
      leaves: shapes of the gradient's leaves, which `power_sgd` needs; `None` assumes
        matrices of 1,024 x 1,024.

    Raises:
      ValueError: for a codec whose speed is not known, or leaves that have another
        number of elements.
    """
    known = _known(codecs, elements, leaves)
    several = cluster.devices > 1 and cluster.hosts > 1
    ways = [
        Way(width, algorithm, name, levels, count)
        for (name, codec), algorithm in itertools.product(known.items(), FORMS)
        for levels in ((False, True) if several else (False,))
        if compatible(algorithm, codec, levels=levels)
        for width in widths
        for count in (buckets if width == 1 else (1,))
        if count == 1 or codec is None or not codec.needs_leaves
    ]
    found = []
    for way in ways:
        exchange = way.exchange(cluster, elements, known[way.codec])
        step = way.step(compute, exchange, one_core=one_core)
        found.append(Choice(way, exchange, step, compute.total))
    dropped = {
        name: 1 - Piece.of(elements, 1, codec).payload / (FLOAT32 * elements)
        for name, codec in known.items()
    }
    return _ranked(found, dropped)


def scaling(
    cluster: Cluster,
    way: Way,
    elements: int,
    compute: Compute,
    codecs: Mapping[str, Codec] | None = None,
    hosts: Sequence[int] = HOSTS,
    *,
    one_core: bool = False,
    leaves: Shapes | None = None,
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
      leaves: as of `plan`.

    Raises:
      ValueError: for a way whose codec is not given, or leaves that have another number
        of elements.
    """
    known = _known(codecs, elements, leaves)
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


def _known(
    codecs: Mapping[str, Codec] | None, elements: int, leaves: Shapes | None
) -> dict[str | None, Codec | None]:
    """The codecs by name, made for these leaves; no codec is `None`."""
    shapes = square_leaves(elements) if leaves is None else leaves
    there = sum(map(math.prod, shapes))
    if there != elements:
        raise ValueError(
            f"`leaves` must have the {elements} elements of the gradient, got shapes of"
            f" {there}."
        )
    found: dict[str | None, Codec | None] = {None: None}
    found |= {name: codec.of(shapes) for name, codec in (codecs or {}).items()}
    return found


def _ranked(choices: list[Choice], dropped: Mapping[str | None, float]) -> list[Choice]:
    """By step time; of those that are the same, the simplest first."""

    def simplicity(choice: Choice) -> tuple[int, int, float, bool, float]:
        way, total = choice.way, choice.exchange.total
        return way.width, way.buckets, dropped[way.codec], way.levels, total

    left, ranked = sorted(choices, key=lambda c: c.step), []
    while left:
        end = left[0].step * (1 + SAME)
        same = [choice for choice in left if choice.step <= end]
        ranked += sorted(same, key=simplicity)
        left = left[len(same) :]
    return ranked

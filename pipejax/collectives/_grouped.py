"""Several all-reduces side by side, each of some of the arrays.

Stage k of all of them is one stage, so that arrays which must not be encoded together
still need no more stages.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pipejax._internal.mesh import AxisName

from ._all_reduce import AllReduce
from ._layout import Layout, Summands
from ._stages import Link, Local, Sent, Stages, States, chained, local, renamed


@dataclasses.dataclass(frozen=True)
class Grouped(AllReduce):
    """An algorithm that sums sets of arrays side by side, each as if it were alone.

    Attributes:
      all_reduce: The algorithm.
      sets: The places of the coded arrays of each set. The arrays that travel exactly
        are in the first set.
    """

    all_reduce: AllReduce
    sets: tuple[tuple[int, ...], ...]

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        layouts = [layout._replace(**x._asdict()) for x in self._split(layout)]
        parts = [self.all_reduce(part, axis_name) for part in layouts]

        def finish(values: list[Summands]) -> Summands:
            coded = in_order(self.sets, [own.coded for own in values])
            return Summands(coded, values[0].exact)

        return local(self._split) + side_by_side(parts) + local(finish)

    def _split(self, arrays: Any) -> list[Summands]:
        coded = [tuple(arrays.coded[i] for i in places) for places in self.sets]
        exact = [arrays.exact, *[()] * (len(self.sets) - 1)]
        return [Summands(*pair) for pair in zip(coded, exact, strict=True)]


def in_order(
    sets: Sequence[Sequence[int]], arrays: Sequence[Sequence[Any]]
) -> tuple[Any, ...]:
    """Returns the arrays of all sets in one tuple, sorted by place."""
    pairs = [
        pair
        for own in zip(sets, arrays, strict=True)
        for pair in zip(*own, strict=True)
    ]
    return tuple(x for _, x in sorted(pairs, key=lambda pair: pair[0]))


def side_by_side(parts: Sequence[Stages]) -> Stages:
    """Returns several all-reduces as one, whose value is a list with theirs."""
    # The first part keeps its names, so that a single part has the states that it has
    # alone.
    own = [renamed(part, f"{i} ") if i else part for i, part in enumerate(parts)]
    rest = [part.by_stage for part in own]
    links: tuple[Link, ...] = ()
    # The last list of links of each part is its finish. A part that has fewer stages
    # than others waits with its finish until all have had theirs.
    while any(len(stages) > 1 for stages in rest):
        now = {i: stages.pop(0) for i, stages in enumerate(rest) if len(stages) > 1}
        # Work before this place uses what the last collective brought. Only the work
        # from there on prepares the next one, and may be marked so.
        begins = {i: _first_encoding(stage) for i, stage in now.items()}
        before = {i: stage[: begins[i]] for i, stage in now.items()}
        encode = {i: stage[begins[i] : -1] for i, stage in now.items()}
        sent = {i: stage[-1] for i, stage in now.items()}
        links += _each(before), _each(encode, encodes=True), _all_sent(sent)
    links += (_each({i: finish for i, (finish,) in enumerate(rest)}),)
    return Stages(links, tuple(init for part in own for init in part.inits))


def _first_encoding(stage: Sequence[Any]) -> int:
    """Returns the place of the first link that only prepares what is sent."""
    sends = len(stage) - 1
    return next((i for i in range(sends) if stage[i].encodes), sends)


def _each(links: Mapping[int, Sequence[Link]], *, encodes: bool = False) -> Local:
    """Returns the local work of some of the all-reduces, by their places."""

    def run(values: Any, states: States) -> tuple[Any, States]:
        values = list(values)
        for i, own in links.items():
            values[i], states = chained(own)((values[i], states))
        return values, states

    return Local(run, encodes)


def _all_sent(links: dict[int, Any]) -> Sent:
    """Returns the collectives of some of the all-reduces, by their places."""

    def run(values: Any) -> Any:
        return [links[i].run(x) if i in links else x for i, x in enumerate(values)]

    return Sent(
        run,
        tuple(x for link in links.values() for x in link.transfers),
        max(link.relative for link in links.values()),
    )

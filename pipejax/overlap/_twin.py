"""Compares the collectives inside groups of two programs: a step and its twin."""

from typing import NamedTuple

from pipejax._internal.hlo import Report, amount
from pipejax._internal.mesh import AxisName, axes

# A pipelined step may send a few numbers more, such as whether all is finite.
SCALARS = 1024.0


class Inside(NamedTuple):
    """The collectives of one kind over the same inner axes, in two programs.

    Attributes:
      kind: The kind, as in `Collective.kind`.
      axes: The mesh axes.
      times: How often they run in the first program, and in the second.
      bytes: What a device contributes to all of them, in each of the programs.
    """

    kind: str
    axes: tuple[str, ...]
    times: tuple[int, int]
    bytes: tuple[float, float]

    @property
    def alike(self) -> bool:
        """Returns whether the second program moves at most 1 % and 1 kB more."""
        first, second = self.bytes
        return second <= 1.01 * first + SCALARS

    def __str__(self) -> str:
        first, second = (f"{amount(each)}B" for each in self.bytes)
        return (
            f"{self.kind} over {'+'.join(self.axes)}: {self.times[0]} and"
            f" {self.times[1]} times, {first} and {second}"
        )


def difference_inside(
    twin: Report, report: Report, axis_name: AxisName
) -> tuple[Inside, ...]:
    """Compares the collectives inside groups of a step with those of its twin.

    A pipelined step should have the same collectives inside groups as the synchronous
    step. There are more bytes if XLA sums whole gradients in a group, for example,
    instead of leaving each device its shard.

    Args:
      twin: The report on the synchronous step.
      report: The report on the pipelined step. Both must know the mesh.
      axis_name: Axis or axes of the data. Collectives over these axes alone are part of
        the exchange, and are left out.

    Returns:
      An `Inside` for each kind of collective over each set of axes.
    """
    found: dict[tuple[str, tuple[str, ...]], list[list[float]]] = {}
    for place, one in enumerate((twin, report)):
        for collective in one.collectives:
            names = collective.axes or ()
            if set(names) <= set(axes(axis_name)):
                continue
            sums = found.setdefault((collective.kind, names), [[0, 0], [0, 0]])
            sums[0][place] += collective.times
            sums[1][place] += collective.times * collective.bytes
    return tuple(
        Inside(kind, names, (int(times[0]), int(times[1])), (sent[0], sent[1]))
        for (kind, names), (times, sent) in sorted(found.items())
    )

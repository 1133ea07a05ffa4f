"""Schedules: the all-reduce algorithm changes at given steps of a run."""

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Sequence

from jax.sharding import Mesh

from pipejax._internal.integers import is_integer
from pipejax._internal.mesh import AxisName

from ._all_reduce import AllReduce
from ._layout import Layout
from ._stages import Stages, renamed


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All-reduce algorithms and the steps at which they change; see `scheduled`.

    Attributes:
      phases: The algorithms in order. The states of their codecs have distinct names.
      boundaries: Steps at which the next algorithm takes over, in increasing order.
    """

    phases: tuple[AllReduce, ...]
    boundaries: tuple[int, ...] = ()

    def phase(self, step: int) -> int:
        """Returns the index in `phases` of the algorithm that runs at `step`."""
        return bisect.bisect_right(self.boundaries, step)


@dataclasses.dataclass(frozen=True)
class ScheduledAllReduce(AllReduce):
    """One algorithm of a schedule, with its number in the names of codec states."""

    all_reduce: AllReduce
    number: int

    @property
    def axes(self) -> int | None:
        return self.all_reduce.axes

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        return self.named(self.all_reduce(layout, axis_name))

    def named(self, stages: Stages) -> Stages:
        # The states of all algorithms of a schedule are kept in one dict.
        return renamed(stages, f"phase {self.number} ")

    def on(self, mesh: Mesh) -> "ScheduledAllReduce":
        return ScheduledAllReduce(self.all_reduce.on(mesh), self.number)

    def unmerged(self) -> "ScheduledAllReduce":
        return ScheduledAllReduce(self.all_reduce.unmerged(), self.number)


def scheduled(all_reduces: Sequence[AllReduce], boundaries: Sequence[int]) -> Schedule:
    """Changes from one all-reduce to the next at given steps.

    It does for all-reduces what `optax.join_schedules` does for learning rates. A
    typical use sends the gradients of the first steps uncompressed, since these are the
    most sensitive to errors.

    The choice is made on the host, between two steps, and every algorithm is compiled
    into a program of its own. The codec states of all algorithms are part of the train
    state.

    Args:
      all_reduces: The algorithms in order, one more than there are boundaries.
      boundaries: Steps at which the next algorithm takes over, counted from 0. They are
        positive and in increasing order.

    Returns:
      A `Schedule`, which `make_train_step(all_reduce=...)` takes.

    Raises:
      ValueError: If the boundaries are not positive, increasing and one fewer than the
        algorithms, or if an element of `all_reduces` is not an `AllReduce`.

    Examples:
      A schedule that compresses from step 500 on:

      >>> from pipejax import codecs
      >>> from pipejax.collectives import psum, scheduled, two_shot
      >>> schedule = scheduled([psum(), two_shot(codecs.int8())], boundaries=[500])
      >>> [schedule.phase(step) for step in (0, 499, 500)]
      [0, 0, 1]
    """
    if not isinstance(all_reduces, Sequence) or not all(
        isinstance(each, AllReduce) for each in all_reduces
    ):
        raise ValueError(
            "`all_reduces` must be a list of algorithms such as pj.collectives.psum(),"
            f" got {all_reduces!r}."
        )
    ends = [0, *boundaries]
    rising = all(is_integer(b, a + 1) for a, b in itertools.pairwise(ends))
    if len(all_reduces) != len(ends) or not rising:
        raise ValueError(
            "`boundaries` must be positive and increasing integers, one fewer than"
            f" `all_reduces`; got {ends[1:]} for {len(all_reduces)} algorithms."
            " Give the step at which each algorithm but the first takes over."
        )
    phases = (ScheduledAllReduce(x, i) for i, x in enumerate(all_reduces))
    return Schedule(tuple(phases), tuple(map(operator.index, boundaries)))

"""One algorithm after another, as the run goes on."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from jax.sharding import Mesh

from pipejax.mesh import AxisName

from ._all_reduce import AllReduce
from ._layout import Layout
from ._stages import Stages, renamed


@dataclasses.dataclass(frozen=True)
class Schedule:
    """See `scheduled`.

    Attributes:
      phases: the algorithms, each with names of its own for its codecs' states.
      boundaries: steps at which the next one takes over.
    """

    phases: tuple[AllReduce, ...]
    boundaries: tuple[int, ...] = ()

    def phase(self, step: int) -> int:
        """Which runs at this step, counted from 0."""
        return bisect.bisect_right(self.boundaries, step)


@dataclasses.dataclass(frozen=True)
class Phase(AllReduce):
    """An algorithm of several whose states lie side by side."""

    all_reduce: AllReduce
    number: int

    @property
    def axes(self) -> int | None:
        """As of the algorithm."""
        return self.all_reduce.axes

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """As the algorithm, its states named by its number."""
        return renamed(self.all_reduce(layout, axis_name), f"phase {self.number} ")

    def on(self, mesh: Mesh) -> "Phase":
        """As the algorithm."""
        return Phase(self.all_reduce.on(mesh), self.number)


def scheduled(all_reduces: Sequence[AllReduce], boundaries: Sequence[int]) -> Schedule:
    """One all-reduce after another, as `optax.join_schedules` joins learning rates.

    Which one runs is decided between steps, on the host, and each is a program of its
    own: no branch surrounds a collective, and none of them is in the other's way.

      `scheduled([psum(), two_shot(int8())], [500])` compresses from step 500 on.

    Args:
      all_reduces: one more than there are boundaries.
      boundaries: steps, rising, at which the next one takes over.

    Returns:
      What `make_train_step(all_reduce=...)` takes.

    Raises:
      ValueError: for numbers that do not fit, or boundaries that do not rise.
    """
    ends = (0, *boundaries)
    rising = all(a < b for a, b in itertools.pairwise(ends))
    if len(all_reduces) != len(ends) or not rising:
        raise ValueError(
            "`boundaries` must rise from above 0, one fewer than `all_reduces`; got"
            f" {list(boundaries)} for {len(all_reduces)} of them."
        )
    for all_reduce in all_reduces:
        if not isinstance(all_reduce, AllReduce):
            raise ValueError(
                "`all_reduces` must be algorithms such as pj.collectives.psum(), got"
                f" {all_reduce!r}."
            )
    phases = (Phase(x, i) for i, x in enumerate(all_reduces))
    return Schedule(tuple(phases), tuple(boundaries))

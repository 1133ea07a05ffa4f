"""The schedule of local steps: which steps of a round have a chunk beside them."""

import dataclasses
import math

from .integers import is_integer


@dataclasses.dataclass(frozen=True)
class RoundSchedule:
    """The lengths of a round and of its exchange.

    Attributes:
      sync_every: Number of steps H of a round.
      overlap_steps: Number of steps V of a round that have a chunk beside them, at most
        H. With 0, the exchange follows the last step of the round.

    Raises:
      ValueError: If H is not an integer of at least 1, or V not one from 0 to H.
    """

    sync_every: int
    overlap_steps: int

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("overlap_steps", 0)):
            if not is_integer(value := getattr(self, name), least):
                raise ValueError(
                    f"`{name}` must be an integer of at least {least}, got {value!r}."
                )
        if self.overlap_steps > self.sync_every:
            raise ValueError(
                "`overlap_steps` must be at most `sync_every`: a step has at most one"
                f" chunk beside it. Got {self.overlap_steps} and {self.sync_every}."
            )

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of an exchange."""
        return max(1, self.overlap_steps)

    def chunk_at(self, taken: int) -> int | None:
        """Returns the chunk that is exchanged beside a step, or `None`.

        The V chunks are spread over the H steps. The last one has the last step.

        Args:
          taken: Number of steps of the round before this one.

        Examples:
          >>> [RoundSchedule(5, 3).chunk_at(taken) for taken in range(5)]
          [None, 0, None, 1, 2]
        """
        place = taken % self.sync_every
        before, after = (
            steps * self.overlap_steps // self.sync_every
            for steps in (place, place + 1)
        )
        return before if after > before else None


def steps_that_hide(step: float, exchange: float, fixed: float) -> int | None:
    r"""Returns in how many chunks, one beside each step, an exchange is hidden.

    With c, x and l the seconds of a step, of an exchange in one chunk and of its part
    that every chunk takes, `l <= x`, it is the smallest n of at least 1 for which

    $$x + (n - 1) l \le n c$$

    The result is `None` if there is none, because l is c or more.
    """
    return None if fixed >= step else whole_steps((exchange - fixed) / (step - fixed))


def whole_steps(steps: float) -> int:
    """Returns a number of steps, rounded up to at least 1."""
    # A rounding error must not add a step.
    return max(1, math.ceil(steps - 1e-9))

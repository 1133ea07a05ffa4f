"""Which steps of a round have a chunk beside them."""

from typing import NamedTuple


class Schedule(NamedTuple):
    """The lengths of a round and of its exchange.

    Attributes:
      sync_every: Number of steps H of a round.
      overlap_steps: Number of steps V of a round that have a chunk beside them, at most
        H. With 0, the exchange follows the last step of the round.
    """

    sync_every: int
    overlap_steps: int

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
          >>> [Schedule(5, 3).chunk_at(taken) for taken in range(5)]
          [None, 0, None, 1, 2]
        """
        place = taken % self.sync_every
        begun, after = (
            steps * self.overlap_steps // self.sync_every
            for steps in (place, place + 1)
        )
        return begun if after > begun else None

"""The parts of a state that programs of local steps replace, read, send and return."""

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from pipejax._core.message import Passengers
from pipejax._core.rounds import (
    Arrival,
    Chunk,
    ChunkState,
    Form,
    GroupModel,
    LocalInfo,
    RoundPassengers,
)
from pipejax._core.step import Common
from pipejax._internal.types import ModelState


class StepKind(NamedTuple):
    """The parts that a step has besides training, each kind in a program of its own.

    Attributes:
      exchanges: A chunk is exchanged.
      reports: This chunk is the last of a round, with which the report travels.
    """

    exchanges: bool = False
    reports: bool = False

    @classmethod
    def of(cls, number: int | None, chunks: int) -> "StepKind":
        """Returns the kind of a step with this of several chunks, or none, beside it.

        There is something to report.
        """
        return cls(number is not None, number == chunks - 1)


TRAINS = StepKind()
EXCHANGES = StepKind(exchanges=True)
REPORTS = StepKind(exchanges=True, reports=True)
KINDS = (TRAINS, EXCHANGES, REPORTS)


class Moves(NamedTuple):
    """The part of a state that a step replaces, and may overwrite.

    Attributes:
      local: The parameters and the optimizer state of the group, and its counters.
      reported: The sum of what the group reports of the round so far.
      due: The chunk that is exchanged, or `None`.
    """

    local: Common
    reported: Passengers
    due: ChunkState | None


class RoundReads(NamedTuple):
    """The part of a state that a step reads.

    Attributes:
      number: The place of the chunk that is exchanged, or `None`.
      refused: The number of chunks so far that were left out, or `None`. Reports hold
        the same array, which no step may overwrite.
      steps: The number of steps in `Moves.reported`, or `None` if nothing is exchanged.
      agreed: The model state that all groups agree on, or `None`.
      form: The form of what groups train. It has no leaves.
    """

    number: ArrayLike | None
    refused: jax.Array | None
    steps: ArrayLike | None
    agreed: ModelState
    form: Form

    @property
    def valid(self) -> Any:
        """Returns whether groups have taken a step in this round.

        If not, groups send zeros, and their sum is not applied, so a codec must keep
        its residual.
        """
        steps: Any = self.steps
        return steps > 0


class SentChunk(NamedTuple):
    """The part of a round that a group sends in one exchange.

    Attributes:
      chunk: The difference of the group in one chunk.
      passengers: What travels with it, or `None` if it is not the last.
    """

    chunk: Chunk
    passengers: RoundPassengers | None


class Trained(NamedTuple):
    """The result of training on a batch.

    Attributes:
      info: The report of this step.
      nothing: The report of a round where none has arrived.
    """

    local: Common
    reported: Passengers
    info: LocalInfo
    nothing: Arrival


class Outcome(NamedTuple):
    """The result of exchanging a chunk.

    Attributes:
      model: The model of the group, or `None` if it has not moved.
      due: The chunk after its exchange, or `None`.
      refused: The number of chunks so far that were left out, or `None`.
      agreed: The model state that all groups agree on next, if a round is reported.
      arrival: The report of a round, or `None`.
      alike: As in `Reduced`.
    """

    model: GroupModel | None = None
    due: ChunkState | None = None
    refused: jax.Array | None = None
    agreed: ModelState = None
    arrival: Arrival | None = None
    alike: jax.Array | None = None

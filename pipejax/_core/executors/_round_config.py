"""The rounds of local steps as static configuration, and the work of one group."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Passengers, Reduced
from pipejax._core.rounds import (
    Arrival,
    Chunk,
    ChunkState,
    LocalInfo,
    arrived,
    differences,
    inner_step,
    merged,
    reporting,
)
from pipejax._core.step import Common, Inputs, info_of
from pipejax._internal.types import CodecStates, Tree

from ._config import StepConfig


class StepKind(NamedTuple):
    """What a step does besides training. There is a program for each kind."""

    exchanges: bool  # a chunk of the round before
    merges: bool  # the last chunk arrives, and groups move by the corrections
    begins: bool  # a round ends, and its exchange begins


class RoundInputs(NamedTuple):
    """What a program takes of a round, besides what a group trains.

    Attributes:
      due: The chunk that is exchanged, or `None`.
      corrections: Those of the chunks before, if groups merge.
      anchors: The other chunks of the anchor, if a round begins.
      sent: The report that travels with the chunk.
    """

    due: ChunkState | None
    corrections: tuple[Chunk, ...]
    anchors: tuple[Chunk, ...]
    sent: Passengers


class Outcome(NamedTuple):
    """What a program has made of a round.

    Attributes:
      params: The parameters of the group, if it was given them.
      due: The chunk after its exchange, or `None`.
      buffer: The differences of the round that begins, or `None`.
      arrival: The report of the round that has arrived, or `None`.
    """

    params: optax.Params | None
    due: ChunkState | None
    buffer: tuple[Chunk, ...] | None
    arrival: Arrival | None


class Trained(NamedTuple):
    """What a group has made of a batch.

    Attributes:
      local: What the group trains.
      reported: The report of the round so far.
      sent: The report of the round that ends with this step, or `None`.
      info: The report of this step.
    """

    local: Common
    reported: Passengers
    sent: Passengers | None
    info: LocalInfo


@dataclasses.dataclass(frozen=True, eq=False)
class RoundConfig:
    """Configuration of local steps.

    Attributes:
      sync_every: Number of steps H of a round.
      overlap_steps: Number of steps V in which the exchange of a round is hidden, at
        most H. With 0, it follows the last step of the round.
    """

    config: StepConfig
    outer_tx: optax.GradientTransformation
    sync_every: int
    overlap_steps: int

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of an exchange."""
        return max(1, self.overlap_steps)

    def train(
        self, kind: StepKind, local: Common, reported: Passengers, inputs: Inputs
    ) -> Trained:
        """Returns what one group makes of its share of a batch, by itself."""
        local, info, message = inner_step(self.config.step, alone(local), inputs)
        reported, sent = reporting(reported, message, self.sync_every), None
        if kind.begins:
            reported, sent = jax.tree.map(jnp.zeros_like, reported), reported
        own = stacked((info.loss, info.grad_norm, info.applied, info.skipped))
        return Trained(stacked(local), reported, sent, LocalInfo(*own))

    def after(
        self,
        kind: StepKind,
        params: optax.Params | None,
        given: RoundInputs,
        summed: tuple[Reduced, CodecStates] | None,
    ) -> Outcome:
        """Returns what one group makes of a round, once a chunk has been summed."""
        params, due = alone(params), given.due
        buffer = arrival = None
        if due is not None and summed is not None:
            due = arrived(self.outer_tx, due, *summed, self.config.devices)
            if kind.merges:
                params = merged(params, (*given.corrections, due.buffer))
                found = summed[0].sum.passengers
                arrival = self.arrival(found.values, given.sent, due.refused)
        if kind.begins:
            anchors = given.anchors if due is None else (*given.anchors, due.anchor)
            buffer = differences(anchors, params)
        return Outcome(stacked(params), due, buffer, arrival)

    def arrival(
        self, total: jax.Array | None, like: Passengers, refused: jax.Array
    ) -> Arrival:
        """Returns the report of a round from its sum, or `None` if none has arrived."""
        came = jnp.array(total is not None)
        passengers = like if total is None else dataclasses.replace(like, values=total)
        reduced = Reduced.of(Message({}, None, passengers), came)
        found = info_of(reduced, None, self.config.devices)
        return Arrival(
            loss=jnp.asarray(found.loss),
            metrics=found.metrics,
            weight=jnp.asarray(found.weight),
            arrived=came,
            refused=refused,
        )

    def specs(self, kind: StepKind) -> tuple[RoundInputs, Outcome]:
        """Returns how what a program takes of a round, and makes of it, is split."""
        whole: Any = P()
        own: Any = P(self.config.axis_name)
        due = ChunkState(whole, whole, whole, own, own) if kind.exchanges else None
        return RoundInputs(due, own, whole, own), Outcome(own, due, own, whole)


def alone(tree: Tree) -> Any:
    """Returns the arrays of one group, without the axis of groups."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)


def stacked(tree: Tree) -> Any:
    """Undoes `alone`."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

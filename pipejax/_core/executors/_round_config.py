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
    Form,
    GroupModel,
    LocalInfo,
    RoundPassengers,
    agreed_on,
    arrived,
    changes_of,
    differences,
    inner_step,
    merged,
    message_of,
    reporting,
)
from pipejax._core.step import Common, Inputs, info_of
from pipejax._internal.mesh import inner_axes
from pipejax._internal.shards import UNSHARDED, Shards
from pipejax._internal.types import CodecStates, ModelState, Tree

from ._config import StepConfig


class StepKind(NamedTuple):
    """The parts that a step has besides training, each kind in a program of its own.

    Attributes:
      exchanges: A chunk of the round before is exchanged.
      merges: This chunk is the last, so that groups move by the corrections.
      begins: A round ends with this step, and its exchange begins.
    """

    exchanges: bool = False
    merges: bool = False
    begins: bool = False

    def model_of(self, local: Common) -> GroupModel | None:
        """Returns the models of groups, or `None` where they are not needed."""
        if not (self.merges or self.begins):
            return None
        return GroupModel(local.trainable.params, local.model_state)


TRAINS = StepKind()
EXCHANGES = StepKind(exchanges=True)
MERGES = StepKind(exchanges=True, merges=True)
BEGINS = StepKind(begins=True)
# A chunk is exchanged in the last step of a round only if it is the last.
KINDS = (TRAINS, EXCHANGES, MERGES, BEGINS, MERGES._replace(begins=True))


class Moves(NamedTuple):
    """The part of a state that a step replaces, and may overwrite.

    Attributes:
      local: The parameters and the optimizer state of the group, and its counters.
      reported: The report of the round so far.
      due: The chunk that is exchanged, or `None`.
    """

    local: Common
    reported: Passengers
    due: ChunkState | None


class RoundReads(NamedTuple):
    """The part of a state that a step reads.

    Attributes:
      corrections: Those of all chunks but the last, if groups merge.
      anchors: All chunks of the anchor but the one that is due, if a round begins.
      agreed: The model state that all groups agree on, if groups merge or a round
        begins.
      sent: What travels with the chunk that is due, if it is the last.
      form: The form of what groups train. It has no leaves.
    """

    corrections: tuple[Chunk, ...]
    anchors: tuple[Chunk, ...]
    agreed: ModelState
    sent: RoundPassengers | None
    form: Form


class Trained(NamedTuple):
    """The result of training on a batch.

    Attributes:
      ended: The report of the round that ends with this step, or `None`.
      info: The report of this step.
      nothing: The report of a round where none has arrived.
    """

    local: Common
    reported: Passengers
    ended: Passengers | None
    info: LocalInfo
    nothing: Arrival


class Outcome(NamedTuple):
    """The result of exchanging a chunk, and of beginning a round.

    Attributes:
      model: The model of the group, or `None` if it has not moved.
      due: The chunk after its exchange, or `None`.
      agreed: The model state that all groups agree on next, if they have merged.
      buffer: The differences of the round that begins, or `None`.
      changes: The changes of the model state in that round, or `None`.
      arrival: The report of the round that has arrived, or `None`.
    """

    model: GroupModel | None = None
    due: ChunkState | None = None
    agreed: ModelState = None
    buffer: tuple[Chunk, ...] | None = None
    changes: Tree = None
    arrival: Arrival | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RoundConfig:
    """Configuration of local steps.

    Attributes:
      inner: The configuration of a step of one group, and of the exchange.
      sync_every: Number of steps H of a round.
      overlap_steps: Number of steps V in which the exchange of a round is hidden, at
        most H. With 0, it follows the last step of the round.
      warmup_steps: Number of synchronous steps before the first round.
    """

    inner: StepConfig
    outer_tx: optax.GradientTransformation
    sync_every: int
    overlap_steps: int
    warmup_steps: int = 0

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of an exchange."""
        return max(1, self.overlap_steps)

    @property
    def chunk_spec(self) -> P:
        """Returns how the devices of a group divide a chunk, over inner axes."""
        inner = inner_axes(self.inner.mesh, self.inner.axis_name)
        return P(inner) if inner else P()

    def message(
        self, chunk: Chunk, sent: RoundPassengers | None, form: Form
    ) -> Message:
        """Returns the message of a chunk, with what travels with it."""
        shards, inner = UNSHARDED, inner_axes(self.inner.mesh, self.inner.axis_name)
        if inner:
            shards = Shards(
                params=(self.chunk_spec,) * len(chunk),
                changes=() if sent is None else form.changes,
                inner=inner,
            )
        return message_of(chunk, sent, shards)

    def train(
        self, kind: StepKind, local: Common, reported: Passengers, inputs: Inputs
    ) -> Trained:
        """Returns what one group makes of its share of a batch, by itself."""
        local, info, message = inner_step(self.inner.step, alone(local), inputs)
        reported, ended = reporting(reported, message), None
        if kind.begins:
            ended = jax.tree.map(lambda x: x / self.sync_every, reported)
            reported = jax.tree.map(jnp.zeros_like, reported)
        own = stacked((local, LocalInfo.of(info)))
        nothing = self.arrival(None, reported, jnp.int32(0))
        return Trained(own[0], reported, ended, own[1], nothing)

    def after(
        self,
        kind: StepKind,
        model: GroupModel | None,
        due: ChunkState | None,
        reads: RoundReads,
        summed: tuple[Reduced, CodecStates] | None,
    ) -> Outcome:
        """Returns what one group makes of a chunk that has been summed.

        `model` is `kind.model_of` the group.
        """
        model, agreed, outcome = alone(model), reads.agreed, Outcome()
        if due is not None and summed is not None:
            due = arrived(self.outer_tx, due, *summed, self.inner.devices)
            outcome = Outcome(due=due)
            if model is not None and reads.sent is not None:
                model, agreed = self._merged(model, due, reads, summed[0])
                total = summed[0].sum.passengers.values
                arrival = self.arrival(total, reads.sent.report, due.refused)
                outcome = Outcome(stacked(model), due, agreed, arrival=arrival)
        if kind.begins and model is not None:
            last = () if due is None else (due.anchor,)
            anchor = (*reads.anchors, *last)
            outcome = outcome._replace(
                buffer=differences(reads.form, anchor, model.params),
                changes=changes_of(reads.form, model.model_state, agreed),
            )
        return outcome

    def _merged(
        self, model: GroupModel, due: ChunkState, reads: RoundReads, reduced: Reduced
    ) -> tuple[GroupModel, ModelState]:
        """Returns the model of a group after the last chunk, and what all agree on."""
        assert reads.sent is not None
        params = merged(reads.form, model.params, (*reads.corrections, due.buffer))
        agreed, own = agreed_on(
            reads.agreed,
            model.model_state,
            reads.sent.changes,
            reduced,
            self.inner.devices,
        )
        return GroupModel(params, own), agreed

    def arrival(
        self,
        total: jax.Array | None,
        like: Passengers,
        refused: jax.Array,
        groups: int | None = None,
    ) -> Arrival:
        """Returns the report of a round from its sum, or that of none if it is `None`.

        `groups` is the number of groups in the sum, by default that of the mesh.
        """
        came = jnp.array(total is not None)
        passengers = like if total is None else dataclasses.replace(like, values=total)
        reduced = Reduced.of(Message({}, None, passengers), came)
        found = info_of(reduced, None, groups or self.inner.devices)
        return Arrival(
            loss=jnp.asarray(found.loss),
            metrics=found.metrics,
            weight=jnp.asarray(found.weight),
            arrived=came,
            refused=refused,
        )

    def specs(self, kind: StepKind) -> tuple[Moves, RoundReads, Trained, Outcome]:
        """Returns how arguments and results are split over groups."""
        whole: Any = P()
        own: Any = P(self.inner.axis_name)
        due = ChunkState(whole, whole, whole, own, own) if kind.exchanges else None
        return (
            Moves(own, own, due),
            RoundReads(own, whole, whole, own, whole),
            Trained(own, own, own, own, whole),
            Outcome(own, due, whole, own, own, whole),
        )


def with_model(local: Common, model: GroupModel | None) -> Common:
    """Returns what a group trains, with another model if one is given."""
    if model is None:
        return local
    trainable = local.trainable._replace(params=model.params)
    return local._replace(trainable=trainable, model_state=model.model_state)


def alone(tree: Tree) -> Any:
    """Returns the arrays of one group, without the axis of groups."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)


def stacked(tree: Tree) -> Any:
    """Undoes `alone`."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

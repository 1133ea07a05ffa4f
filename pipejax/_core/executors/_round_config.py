"""The rounds of local steps as static configuration, and the work of one group."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from pipejax._core.message import (
    Exchange,
    Mark,
    Message,
    Passengers,
    Reduced,
    averaging,
    marked,
)
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
    check_changes,
    difference,
    inner_step,
    message_of,
    moved,
    points_of,
    refused_after,
    reporting,
)
from pipejax._core.step import Common, Inputs, info_of, moves
from pipejax._internal.mesh import auto_mesh, inner_axes
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.shards import UNSHARDED, Shards
from pipejax._internal.structures import merged
from pipejax._internal.types import Tree

from ._by_shard import placed_once
from ._config import StepConfig
from ._round_parts import Moves, Outcome, RoundReads, SentChunk, StepKind, Trained


@dataclasses.dataclass(frozen=True, eq=False)
class RoundConfig:
    """Configuration of local steps.

    Attributes:
      inner: The configuration of a step of one group, and of the exchange.
      schedule: Which steps of a round have a chunk beside them. `None` leaves this to
        the state.
      warmup_steps: Number of synchronous steps before the first round.
    """

    inner: StepConfig
    outer_tx: optax.GradientTransformation
    schedule: RoundSchedule | None
    warmup_steps: int = 0

    def schedule_of(self, form: Form) -> RoundSchedule:
        """Returns the schedule of a state with this form."""
        return self.schedule or form.schedule

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

    def exchange(self, sent: SentChunk, reads: RoundReads, batch: Tree) -> Exchange:
        """Returns the exchange of a chunk, inside the program of a group.

        `batch` is that of the step beside it, or `None` without one.
        """
        inner = self.inner

        def of(message: Message) -> Exchange:
            return averaging(message, reads.valid, inner.sums_by, inner.axis_name)

        message, mark = self.message(*sent, reads.form), self.mark(batch, reads.number)
        return marked(of, message, mark, inner.axis_name)

    def mark(self, batch: Tree, number: Any) -> Mark:
        """Returns the mark of a call that exchanges a chunk, as `StepConfig.mark`."""
        mark = self.inner.mark(batch)
        return None if mark is None else number.astype(np.uint32) ^ mark

    def sent(self, kind: StepKind, moves: Moves, reads: RoundReads) -> SentChunk:
        """Returns the part of a round that one group sends beside a step."""
        assert moves.due is not None
        assert reads.number is not None
        form, local = reads.form, alone(moves.local)
        chunk = difference(form, moves.due.anchor, local.trainable.params, reads.number)
        if not kind.reports:
            return SentChunk(chunk, None)
        report = jax.tree.map(
            lambda x: x / jnp.asarray(reads.steps, x.dtype), moves.reported
        )
        changes = changes_of(form, local.model_state, reads.agreed)
        return SentChunk(chunk, RoundPassengers(report, changes))

    def placed(self, reads: RoundReads) -> RoundReads:
        """Returns what a step reads, with its numbers on the mesh."""
        number, steps = self._placed_once((reads.number, reads.steps))
        return reads._replace(number=number, steps=steps)

    @functools.cached_property
    def _placed_once(self) -> Callable[[Any], Any]:
        return placed_once(auto_mesh(self.inner.mesh))

    def train(
        self,
        kind: StepKind,
        local: Common,
        reported: Passengers,
        inputs: Inputs,
        form: Form,
    ) -> Trained:
        """Returns what one group makes of its share of a batch, by itself."""
        local, info, message = inner_step(self.inner.step, alone(local), inputs)
        check_changes(form, local.model_state, message)
        if kind.reports:  # what is reported so far travels beside this step
            reported = jax.tree.map(jnp.zeros_like, reported)
        reported = reporting(reported, message)
        own = stacked((local, LocalInfo.of(info)))
        nothing = self.arrival(None, reported, jnp.int32(0))
        return Trained(own[0], reported, own[1], nothing)

    def after(
        self,
        model: GroupModel,
        due: ChunkState,
        sent: SentChunk,
        reads: RoundReads,
        reduced: Reduced,
    ) -> Outcome:
        """Returns what one group makes of a chunk that has been summed.

        The codec states stay as they are.
        """
        groups = self.inner.devices
        assert reads.number is not None
        assert reads.refused is not None
        before, own, points = alone(model)
        keep = reduced.finite & reads.valid
        due, correction = arrived(
            self.outer_tx,
            due,
            sent.chunk,
            reduced,
            groups,
            keep,
            self.trained(before, reads.form, reads.number),
        )
        params = reads.form.added(before, correction, reads.number)
        if jax.tree.leaves(points):
            zeros = jax.tree.map(jnp.zeros_like, before)
            change = reads.form.added(zeros, correction, reads.number)
            points = moved(points, before, change)
        refused = refused_after(reads.refused, reduced)
        if sent.passengers is None:
            model = stacked(GroupModel(params, own, points))
            return Outcome(model, due, refused, alike=reduced.alike)
        report, changes = sent.passengers
        agreed, own = agreed_on(reads.agreed, own, changes, reduced, groups)
        arrival = self.arrival(reduced.sum.passengers.values, report, refused)
        model = stacked(GroupModel(params, own, points))
        return Outcome(model, due, refused, agreed, arrival, reduced.alike)

    def trained(
        self, params: optax.Params, form: Form, number: ArrayLike
    ) -> Chunk | None:
        """Returns which elements of a chunk are trained, or `None` if all are.

        Padding counts as not trained.
        """
        trained = moves(self.inner.step.settings.tx, params)
        if all(jax.tree.leaves(trained)) and not form.is_padded(params):
            return None
        flags = jax.tree.map(jnp.full_like, params, trained)
        return jax.tree.map(lambda x: x != 0, form.sliced(flags, number))

    def model_of(self, local: Common, form: Form) -> GroupModel:
        """Returns the part of what a group trains that a round moves."""
        tx, trained = self.inner.step.settings.tx, local.trainable
        points = points_of(tx, form, trained.opt_state)
        return GroupModel(trained.params, local.model_state, points)

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
        found = info_of(reduced, groups or self.inner.devices)
        return Arrival(
            loss=jnp.asarray(found.loss),
            metrics=found.metrics,
            weight=jnp.asarray(found.weight),
            arrived=jnp.asarray(found.arrived),
            refused=refused,
        )

    def specs(self, kind: StepKind) -> tuple[Moves, RoundReads, Trained, Outcome]:
        """Returns how arguments and results are split over groups."""
        whole: Any = P()
        own: Any = P(self.inner.axis_name)
        due = ChunkState(whole, whole, own) if kind.exchanges else None
        return (
            Moves(own, own, due),
            RoundReads(whole, whole, whole, whole, whole),
            Trained(own, own, own, whole),
            Outcome(own, due, whole, whole, whole, own),
        )


def with_model(local: Common, model: GroupModel | None) -> Common:
    """Returns what a group trains, with another model if one is given."""
    if model is None:
        return local
    trained = local.trainable
    trainable = trained._replace(params=model.params)
    if model.points is not None:
        opt_state = merged(model.points, trained.opt_state)
        trainable = trainable._replace(opt_state=opt_state)
    return local._replace(trainable=trainable, model_state=model.model_state)


def alone(tree: Tree) -> Any:
    """Returns the arrays of one group, without the axis of groups."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)


def stacked(tree: Tree) -> Any:
    """Undoes `alone`."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

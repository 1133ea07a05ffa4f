"""Takes local steps: which chunk of which round travels when."""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Passengers
from pipejax._core.rounds import (
    Arrival,
    ChunkState,
    GroupModel,
    LocalState,
    Pending,
    Position,
    RoundInfo,
    RoundPassengers,
    Shared,
    at_agreed,
)
from pipejax._core.step import Common, Inputs, check_not_donated
from pipejax._internal.mesh import inner_axes
from pipejax._internal.types import ModelState

from ._choose import choose_rounds
from ._fused_rounds import FusedRounds
from ._host_rounds import HostRounds
from ._initial_rounds import initial_rounds
from ._own_collectives import OwnCollectiveError
from ._round_config import (
    BEGINS,
    EXCHANGES,
    MERGES,
    TRAINS,
    Moves,
    Outcome,
    RoundConfig,
    RoundReads,
    StepKind,
    alone,
    stacked,
    with_model,
)
from ._thread import join
from ._warm_up import WarmUp

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """The rounds of local steps, with their settings and the executor that runs them.

    Attributes:
      asked: The name of the executor that was asked for, which may be `"auto"`.
    """

    config: RoundConfig
    asked: str
    _chosen: list[FusedRounds | HostRounds] = dataclasses.field(default_factory=list)

    @property
    def executor(self) -> FusedRounds | HostRounds:
        """Returns what runs the steps."""
        if not self._chosen:
            self._chosen.append(choose_rounds(self.asked, self.config))
        return self._chosen[-1]

    def init(
        self, common: Common, like: RoundPassengers, *, abstract: bool = False
    ) -> LocalState:
        """Returns the state in which all groups begin with what is common to them.

        Args:
          common: What a group trains, with its counters and keys, or the shapes.
          like: The form of what a group sends with a round.
          abstract: Whether to return shapes with shardings in place of arrays.

        Returns:
          A `LocalState`.
        """
        mesh = self.executor.reduction_mesh
        return initial_rounds(self.config, mesh, common, like, abstract=abstract)

    def step(self, state: LocalState, inputs: Inputs) -> tuple[LocalState, RoundInfo]:
        """Takes one step of every group, with a chunk of the last round beside it."""
        taken, left, warmup = map(int, state.position)
        if warmup:
            return self._warm_up.step(state, inputs)
        kind = StepKind(left > 0, left == 1, taken + 1 == self.config.sync_every)
        args = kind, *_parted(state, kind), inputs, _pending(state)
        try:
            trained, outcome = self.executor.train(*args)
        except OwnCollectiveError as error:  # known once its program is compiled
            if self.asked != "auto":
                raise
            self._chosen.append(FusedRounds(self.config, error.reason))
            trained, outcome = self.executor.train(*args)
        own = state.own._replace(local=trained.local, reported=trained.reported)
        state = _applied(state._replace(own=own), outcome)
        state = state._replace(position=Position.at(taken + 1, max(left - 1, 0)))
        arrival = outcome.arrival or trained.nothing
        if trained.ended is not None:
            state = self._begun(state, trained.ended)
            if not self.config.overlap_steps:
                state, arrival = self._completed(state)
        arrival = arrival._replace(refused=state.shared.refused)
        return state, RoundInfo(**arrival._asdict(), **trained.info._asdict())

    def drain(self, state: LocalState) -> tuple[LocalState, tuple[Arrival, ...]]:
        """Exchanges what is left of a round, and then the progress since."""
        reports, taken = [], int(state.position.taken)
        if state.position.left:
            state, arrival = self._completed(state)
            reports.append(arrival)
        if taken:
            outcome = self._exchange(state, BEGINS)
            report = self._mean(state.own.reported, taken)
            state = self._begun(_applied(state, outcome), report)
            state, arrival = self._completed(state)
            reports.append(arrival)
        # There is no other progress, and rounding errors end here.
        before = state.own.local.model_state, state.own.reported
        model, empty = self._at_anchor(state.shared, *before)
        local = with_model(state.own.local, model)
        own = state.own._replace(local=local, reported=empty)
        join()
        position = Position.at(0, 0, int(state.position.warmup))
        return LocalState(state.shared, own, position), tuple(reports)

    def lower(self, state: LocalState, inputs: Inputs) -> jax.stages.Lowered:
        """Returns the lowered program of a step that exchanges a chunk."""
        kind = EXCHANGES if self.config.overlap_steps else TRAINS
        first = state._replace(position=Position.at(0, self.config.chunks))
        return self.executor.lower(kind, *_parted(first, kind), inputs)

    def check(self, state: LocalState) -> None:
        """Raises a `ValueError` if a state is not one of these rounds."""
        if not isinstance(state, LocalState):
            raise ValueError(
                "`state` must be the pj.LocalState that `train.init` returned, got"
                f" {type(state).__name__}."
            )
        check_not_donated(state)
        config, (taken, left, _) = self.config, map(int, state.position)
        mesh, axis = config.inner.mesh, config.inner.axis_name
        rules: dict[str, tuple[Any, Any]] = {
            "inner axes": (state.local.shards.inner, inner_axes(mesh, axis)),
            "groups": (state.groups, config.inner.devices),
            "chunks, as `overlap_steps` says": (
                len(state.shared.anchor),
                config.chunks,
            ),
        }
        for name, (found, wanted) in rules.items():
            if found != wanted:
                raise ValueError(
                    f"`state` must be one of {wanted} {name}; got one of {found}."
                    " Drain it with the local step that made it, and go on from"
                    " `train.init(state.params)` of this one."
                )
        if not (0 <= taken < config.sync_every and 0 <= left <= config.chunks):
            raise ValueError(
                f"`state` must be inside a round of {config.sync_every} steps, as"
                f" `sync_every` says; got {taken} steps taken and {left} chunks left."
                " Drain it with the local step that made it."
            )

    def _begun(self, state: LocalState, report: Passengers) -> LocalState:
        """Returns the state at the beginning of a round's exchange."""
        sent, begin = state.own.sent, Position.at(0, self.config.chunks)
        own = state.own._replace(sent=sent._replace(report=report))
        state = LocalState(state.shared, own, begin)
        self.executor.begin(_pending(state))
        return state

    def _completed(self, state: LocalState) -> tuple[LocalState, Arrival]:
        """Exchanges what is left of a round, with nothing beside it."""
        taken, left, _ = map(int, state.position)
        for rest in reversed(range(left)):
            outcome = self._exchange(state, EXCHANGES if rest else MERGES)
            state = _applied(state, outcome)
            state = state._replace(position=Position.at(taken, rest))
        assert outcome.arrival is not None
        return state, outcome.arrival

    def _exchange(self, state: LocalState, kind: StepKind) -> Outcome:
        moves, reads = _parted(state, kind)
        model = kind.model_of(moves.local)
        return self.executor.exchange(kind, model, moves.due, reads, _pending(state))

    @functools.cached_property
    def _warm_up(self) -> WarmUp:
        return WarmUp(self.config)

    @functools.cached_property
    def _mean(self) -> jax.stages.Wrapped:
        return jax.jit(lambda report, steps: jax.tree.map(lambda x: x / steps, report))

    @functools.cached_property
    def _at_anchor(self) -> jax.stages.Wrapped:
        """Returns the program that puts every group at the beginning of a round."""
        config, own = self.config.inner, P(self.config.inner.axis_name)

        def local(
            shared: Shared, own: ModelState, report: Passengers
        ) -> tuple[GroupModel, Passengers]:
            form, agreed = shared.form, shared.model_state
            state = at_agreed(form, alone(own), agreed)
            model = GroupModel(form.whole(shared.anchor), state)
            return stacked(model), jax.tree.map(jnp.zeros_like, report)

        return jax.jit(config.on_mesh(local, (P(), own, own), own))


def _number(state: LocalState) -> int:
    """Returns the place of the chunk that is exchanged next."""
    return len(state.shared.anchor) - int(state.position.left)


def _parted(state: LocalState, kind: StepKind) -> tuple[Moves, RoundReads]:
    """Returns what a kind of step replaces and reads of a state."""
    shared, own, due = state.shared, state.own, None
    if kind.exchanges:
        number = _number(state)
        due = ChunkState(
            anchor=shared.anchor[number],
            outer=shared.outer[number],
            refused=shared.refused,
            buffer=own.buffer[number],
            codec_states=own.codec_states[number],
        )
    others = shared.anchor[:-1] if kind.exchanges else shared.anchor
    reads = RoundReads(
        corrections=own.buffer[:-1] if kind.merges else (),
        anchors=others if kind.begins else (),
        agreed=shared.model_state if kind.merges or kind.begins else None,
        sent=own.sent if kind.merges else None,
        form=shared.form,
    )
    return Moves(own.local, own.reported, due), reads


def _pending(state: LocalState) -> Pending:
    """Returns the chunks that are left of a round."""
    own, number = state.own, _number(state)
    chunks, states = own.buffer[number:], own.codec_states[number:]
    return Pending(chunks, states, own.sent, state.shared.form)


def _applied(state: LocalState, outcome: Outcome) -> LocalState:
    """Returns the state with what a program has made of a round."""
    shared, own = state.shared, state.own
    if outcome.due is not None:
        number, due = _number(state), outcome.due
        shared = shared._replace(
            anchor=_with(shared.anchor, number, due.anchor),
            outer=_with(shared.outer, number, due.outer),
            refused=due.refused,
        )
        own = own._replace(
            buffer=_with(own.buffer, number, due.buffer),
            codec_states=_with(own.codec_states, number, due.codec_states),
        )
    if outcome.arrival is not None:
        shared = shared._replace(model_state=outcome.agreed)
    if outcome.buffer is not None:
        sent = own.sent._replace(changes=outcome.changes)
        own = own._replace(buffer=outcome.buffer, sent=sent)
    own = own._replace(local=with_model(own.local, outcome.model))
    return LocalState(shared, own, state.position)


def _with(items: tuple[Item, ...], number: int, item: Item) -> tuple[Item, ...]:
    return (*items[:number], item, *items[number + 1 :])

"""Takes local steps: which chunk of which round travels when."""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Passengers
from pipejax._core.rounds import (
    Arrival,
    Chunk,
    ChunkState,
    Form,
    GroupState,
    LocalState,
    Position,
    RoundInfo,
    Shared,
    chunked,
)
from pipejax._core.step import Common, Inputs, Trainable
from pipejax._internal.structures import restructured
from pipejax._internal.types import Keys, ModelState

from ._choose import choose_rounds
from ._codec_states import codec_states_of
from ._fused_rounds import FusedRounds, with_params
from ._host_rounds import HostRounds
from ._own_collectives import OwnCollectiveError
from ._round_config import Outcome, RoundConfig, RoundInputs, StepKind, stacked

Item = TypeVar("Item")
TRAINS = StepKind(exchanges=False, merges=False, begins=False)
BEGINS = TRAINS._replace(begins=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of local steps: their settings, and the executor that runs them.

    Attributes:
      asked: The name of the executor that was asked for, which may be `"auto"`.
    """

    rounds: RoundConfig
    asked: str
    _chosen: list[FusedRounds | HostRounds] = dataclasses.field(default_factory=list)

    @property
    def executor(self) -> FusedRounds | HostRounds:
        """Returns what runs the steps."""
        if not self._chosen:
            self._chosen.append(choose_rounds(self.asked, self.rounds))
        return self._chosen[-1]

    def init(
        self,
        params: optax.Params,
        model_state: ModelState,
        rng: Keys,
        opt_state: optax.OptState | None,
        report: Passengers,
    ) -> LocalState:
        """Returns the state in which all groups begin at the same parameters."""
        rounds, config, form = self.rounds, self.rounds.config, Form(params)

        def local(
            params: optax.Params,
            model_state: ModelState,
            rng: Keys,
            opt_state: optax.OptState | None,
        ) -> tuple[Shared, GroupState]:
            new = config.step.settings.tx.init(params)
            given = new if opt_state is None else restructured(opt_state, new)
            trainable = Trainable(params, jax.tree.map(jnp.asarray, given))
            zero = jnp.zeros((), jnp.int32)
            anchor = chunked(params, rounds.chunks)
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), report)
            own = GroupState(
                local=stacked(Common(trainable, model_state, rng, zero, zero)),
                buffer=jax.tree.map(jnp.zeros_like, anchor),
                reported=empty,
                sent=jax.tree.map(jnp.copy, empty),
                codec_states=(),
            )
            outer = tuple(map(rounds.outer_tx.init, anchor))
            return Shared(anchor, outer, zero, form), own

        own: Any = P(config.axis_name)
        made = jax.jit(config.on_mesh(local, (P(),) * 4, (P(), own)))
        shared, group = made(params, model_state, rng, opt_state)
        states = tuple(map(self._codec_states, shared.anchor))
        return LocalState(shared, group._replace(codec_states=states), position(0, 0))

    def step(self, state: LocalState, inputs: Inputs) -> tuple[LocalState, RoundInfo]:
        """Takes one step of every group, with a chunk of the last round beside it."""
        kind, (taken, left) = self._kind(state), map(int, state.position)
        self._ahead(state)
        given, own = self._given(state, kind), state.own
        args = kind, own.local, own.reported, given, inputs
        try:
            trained, outcome = self.executor.train(*args)
        except OwnCollectiveError as error:  # known once its program is compiled
            if self.asked != "auto":
                raise
            self._chosen.append(FusedRounds(self.rounds, error.reason))
            trained, outcome = self.executor.train(*args)
        own = own._replace(local=trained.local, reported=trained.reported)
        state = _applied(state._replace(own=own), outcome)
        state = state._replace(position=position(taken + 1, max(left - 1, 0)))
        arrival = outcome.arrival
        if trained.sent is not None:
            state = self._begun(state, trained.sent)
            if not self.rounds.overlap_steps:
                state, arrival = self._completed(state)
        if arrival is None:
            arrival = self._nothing(state.own.sent, state.shared.refused)
        return state, RoundInfo(**arrival._asdict(), **trained.info._asdict())

    def drain(self, state: LocalState) -> tuple[LocalState, tuple[Arrival, ...]]:
        """Exchanges what is left of a round, and then the progress since."""
        reports, taken = [], int(state.position.taken)
        self._ahead(state)
        if state.position.left:
            state, arrival = self._completed(state)
            reports.append(arrival)
        if taken:
            params = state.own.local.trainable.params
            outcome = self.executor.rest(BEGINS, params, self._given(state, BEGINS))
            # A step adds its part of a whole round to the report.
            sent = self._scaled(state.own.reported, self.rounds.sync_every / taken)
            state = self._begun(_applied(state, outcome), sent)
            state, arrival = self._completed(state)
            reports.append(arrival)
        # There is no other progress, and rounding errors end here.
        own = state.own
        local = with_params(own.local, self._at_anchor(state.shared))
        empty = self._scaled(own.reported, 0.0)
        own = own._replace(local=local, reported=empty)
        self.executor.join()
        return LocalState(state.shared, own, position(0, 0)), tuple(reports)

    def lower(self, state: LocalState, inputs: Inputs) -> jax.stages.Lowered:
        """Returns the lowered program of a step that exchanges a chunk."""
        kind = TRAINS._replace(exchanges=self.rounds.overlap_steps > 0)
        first = state._replace(position=position(0, self.rounds.chunks))
        given, own = self._given(first, kind), state.own
        return self.executor.lower(kind, own.local, own.reported, given, inputs)

    def check(self, state: LocalState) -> None:
        """Raises a `ValueError` if a state is not one of these rounds."""
        rounds, (taken, left) = self.rounds, map(int, state.position)
        steps = jax.tree.leaves(state.own.local.step)
        groups = steps[0].shape[0] if steps else 0
        found = {
            "chunks (overlap_steps, at least 1)": (
                len(state.shared.anchor),
                rounds.chunks,
            ),
            "groups": (groups, rounds.config.devices),
        }
        for name, (was, now) in found.items():
            if was != now:
                raise ValueError(
                    f"`state` must be of a local step with as many {name} as this one,"
                    f" {now}; got {was}. Drain it with the local step that made it, and"
                    " begin anew with `train.init(state.params)`."
                )
        if not (0 <= taken < rounds.sync_every and 0 <= left <= rounds.chunks):
            raise ValueError(
                "`state` must be at a place in a round of `sync_every`"
                f" {rounds.sync_every}; got {taken} steps taken and {left} chunks left."
                " Drain it with the local step that made it."
            )

    def _kind(self, state: LocalState) -> StepKind:
        taken, left = map(int, state.position)
        return StepKind(left > 0, left == 1, taken + 1 == self.rounds.sync_every)

    def _given(self, state: LocalState, kind: StepKind) -> RoundInputs:
        """Returns what the program of a kind of step takes of a round."""
        (anchor, outer, refused, _), own = state.shared, state.own
        due, number = None, self.rounds.chunks - int(state.position.left)
        if kind.exchanges:
            states = own.codec_states[number]
            due = ChunkState(
                anchor[number], outer[number], refused, own.buffer[number], states
            )
        others = anchor[:-1] if kind.exchanges else anchor
        return RoundInputs(
            due=due,
            corrections=own.buffer[:-1] if kind.merges else (),
            anchors=others if kind.begins else (),
            sent=own.sent,
        )

    def _begun(self, state: LocalState, sent: Passengers) -> LocalState:
        """Returns the state at the beginning of a round's exchange."""
        own, left = state.own._replace(sent=sent), self.rounds.chunks
        state = LocalState(state.shared, own, position(0, left))
        self._ahead(state)
        return state

    def _completed(self, state: LocalState) -> tuple[LocalState, Arrival]:
        """Exchanges what is left of a round, with nothing beside it."""
        while True:
            taken, left = map(int, state.position)
            kind = StepKind(exchanges=True, merges=left == 1, begins=False)
            params = state.own.local.trainable.params if kind.merges else None
            outcome = self.executor.rest(kind, params, self._given(state, kind))
            state = _applied(state, outcome)
            state = state._replace(position=position(taken, left - 1))
            if outcome.arrival is not None:
                return state, outcome.arrival

    def _ahead(self, state: LocalState) -> None:
        """Lets an executor begin with the chunks that are left of a round."""
        if left := int(state.position.left):
            own = state.own
            self.executor.ahead(own.buffer[-left:], own.sent, own.codec_states[-left:])

    def _codec_states(self, chunk: Chunk) -> Any:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), chunk)
        config = self.rounds.config.at(self.executor.reduction_mesh)
        return codec_states_of(config, Message(like))

    @functools.cached_property
    def _scaled(self) -> jax.stages.Wrapped:
        return jax.jit(lambda report, by: jax.tree.map(lambda x: x * by, report))

    @functools.cached_property
    def _at_anchor(self) -> jax.stages.Wrapped:
        """Returns the program that gives every group the parameters of the anchor."""
        config, own = self.rounds.config, P(self.rounds.config.axis_name)
        program = config.on_mesh(lambda shared: stacked(shared.params), P(), own)
        return jax.jit(program)

    @functools.cached_property
    def _nothing(self) -> jax.stages.Wrapped:
        config, own = self.rounds.config, P(self.rounds.config.axis_name)
        nothing = functools.partial(self.rounds.arrival, None)
        return jax.jit(config.on_mesh(nothing, (own, P()), P()))


def _applied(state: LocalState, outcome: Outcome) -> LocalState:
    """Returns the state with what a program has made of a round."""
    shared, own = state.shared, state.own
    if outcome.due is not None:
        number = len(shared.anchor) - int(state.position.left)
        anchor, outer, refused, buffer, states = outcome.due
        shared = shared._replace(
            anchor=_with(shared.anchor, number, anchor),
            outer=_with(shared.outer, number, outer),
            refused=refused,
        )
        own = own._replace(
            buffer=_with(own.buffer, number, buffer),
            codec_states=_with(own.codec_states, number, states),
        )
    if outcome.buffer is not None:
        own = own._replace(buffer=outcome.buffer)
    if outcome.params is not None:
        own = own._replace(local=with_params(own.local, outcome.params))
    return LocalState(shared, own, state.position)


def _with(items: tuple[Item, ...], number: int, item: Item) -> tuple[Item, ...]:
    return (*items[:number], item, *items[number + 1 :])


def position(taken: int, left: int) -> Position:
    """Returns a place in a round."""
    return Position(np.int32(taken), np.int32(left))

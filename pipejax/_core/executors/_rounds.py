"""Takes local steps: which chunk of which round travels when."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pipejax._core.rounds import (
    Arrival,
    ChunkState,
    GroupModel,
    LocalState,
    Position,
    RoundInfo,
    RoundPassengers,
    Shared,
    at_agreed,
    change,
    moved,
)
from pipejax._core.step import Common, Inputs
from pipejax._internal.communication_thread import join
from pipejax._internal.round_schedule import RoundSchedule

from ._choose import choose_rounds
from ._fused_rounds import FusedRounds
from ._host_rounds import HostRounds
from ._initial_rounds import initial_rounds
from ._own_collectives import OwnCollectiveError
from ._round_config import RoundConfig, alone, stacked, with_model
from ._round_parts import TRAINS, Moves, Outcome, RoundReads, StepKind, Trained
from ._steps_to_hide import PARTS, Timed, agreed, medians, schedule_to_hide
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
        self,
        common: Common,
        like: RoundPassengers,
        *,
        schedule: RoundSchedule | None = None,
        abstract: bool = False,
    ) -> LocalState:
        """Returns the state in which all groups begin with what is common to them.

        Args:
          common: What a group trains, with its counters and keys, or the shapes.
          like: The form of what a group sends with a round.
          schedule: The schedule, if that of the configuration is `None`. The default is
            a round of one step.
          abstract: Whether to return shapes with shardings in place of arrays.

        Returns:
          A `LocalState`.
        """
        mesh = self.executor.reduction_mesh
        schedule = self.config.schedule or schedule or RoundSchedule(1, 1)
        args = self.config, mesh, schedule, common, like
        return initial_rounds(*args, abstract=abstract)

    def schedule_to_hide(
        self, make: Callable[[RoundSchedule], LocalState], inputs: Inputs
    ) -> RoundSchedule:
        """Returns the rounds that hide an exchange of all parameters.

        Steps and exchanges are timed, and all processes return what the first one has
        found. `make` returns the first state for a schedule.
        """
        inner = dataclasses.replace(self.config.inner, donate=False)
        config = dataclasses.replace(self.config, inner=inner)

        def timed(count: int, *methods: Callable[..., Any]) -> list[float]:
            trial, state = Rounds(config, self.asked), make(RoundSchedule(count, count))
            return medians(*(functools.partial(x, trial, state) for x in methods))

        def step(trial: Rounds, state: LocalState) -> Any:
            return trial._trained(state, TRAINS, None, inputs)

        def first(trial: Rounds, state: LocalState) -> Any:
            kind = _kind(state, 0)
            return trial.executor.exchange(kind, *parted(state, kind, 0))

        # Only one of the two states is there at a time.
        whole = timed(1, step, Rounds._exchanged)
        return agreed(schedule_to_hide(Timed(*whole, *timed(PARTS, first))))

    def step(
        self, state: LocalState, inputs: Inputs
    ) -> tuple[LocalState, RoundInfo, Any]:
        """Takes one step of every group, with the chunk of this step beside it.

        The last result says whether all devices are alike, if they compare it.
        """
        taken, reported, warmup = map(int, state.position)
        if warmup:
            return self._warm_up.step(state, inputs)
        schedule = self.config.schedule_of(state.shared.form)
        number = schedule.chunk_at(taken)
        kind = _kind(state, number)
        trained, outcome = self._trained(state, kind, number, inputs)
        own = state.own._replace(local=trained.local, reported=trained.reported)
        state = _applied(state._replace(own=own), number, outcome)
        taken = (taken + 1) % schedule.sync_every
        position = Position.at(taken, 1 if kind.reports else reported + 1)
        state, arrival = state._replace(position=position), outcome.arrival
        alike: Any = outcome.alike
        if not (taken or schedule.overlap_steps):
            state, arrival, alike = self._exchanged(state)
        arrival = (arrival or trained.nothing)._replace(refused=state.shared.refused)
        return state, RoundInfo(**arrival._asdict(), **trained.info._asdict()), alike

    def drain(self, state: LocalState) -> tuple[LocalState, tuple[Arrival, ...], Any]:
        """Exchanges everything that groups have changed."""
        reports, alike = [], None
        if state.position.reported:
            state, arrival, alike = self._exchanged(state)
            assert arrival is not None
            reports.append(arrival)
        join()  # Only one thread may launch collectives.
        # There is no other progress, and rounding errors end here.
        model = self._at_anchor(state.shared, state.own.local)
        local = with_model(state.own.local, model)
        own = state.own._replace(local=local)
        position = Position.at(0, 0, int(state.position.warmup))
        return LocalState(state.shared, own, position), tuple(reports), alike

    def lower(
        self, state: LocalState, inputs: Inputs, *, own_options: bool = True
    ) -> jax.stages.Lowered:
        """Returns the lowered program of a step that exchanges the first chunk."""
        schedule = self.config.schedule_of(state.shared.form)
        number = 0 if schedule.overlap_steps else None
        kind = StepKind.of(number, schedule.chunks)
        args = *parted(state, kind, number), inputs
        return self.executor.lower(kind, *args, own_options=own_options)

    def _trained(
        self, state: LocalState, kind: StepKind, number: int | None, inputs: Inputs
    ) -> tuple[Trained, Outcome]:
        """Trains on a batch, with the fused executor if the host's cannot."""
        args = kind, *parted(state, kind, number), inputs
        try:
            return self.executor.train(*args)
        except OwnCollectiveError as error:  # known once its program is compiled
            if self.asked != "auto":
                raise
            self._chosen.append(FusedRounds(self.config, error.reason))
            return self.executor.train(*args)

    def _exchanged(
        self, state: LocalState
    ) -> tuple[LocalState, Arrival | None, list[Any]]:
        """Exchanges all chunks, with nothing beside them.

        Returns the report of the steps since the last one, or `None` without any, and
        for each chunk whether all devices are alike.
        """
        alike = []
        for number in range(state.shared.form.chunks):
            kind = _kind(state, number)
            outcome = self.executor.exchange(kind, *parted(state, kind, number))
            state = _applied(state, number, outcome)
            alike.append(outcome.alike)
        own = state.own._replace(reported=self._cleared(state.own.reported))
        position = state.position._replace(reported=np.int32(0))
        return LocalState(state.shared, own, position), outcome.arrival, alike

    @functools.cached_property
    def _warm_up(self) -> WarmUp:
        return WarmUp(self.config)

    @functools.cached_property
    def _cleared(self) -> jax.stages.Wrapped:
        """Returns the program of a report without steps."""
        config, own = self.config.inner, P(self.config.inner.axis_name)
        clear = functools.partial(jax.tree.map, jnp.zeros_like)
        return jax.jit(config.on_mesh(clear, own, own))

    @functools.cached_property
    def _at_anchor(self) -> jax.stages.Wrapped:
        """Returns the program that puts every group at the anchor."""
        config, own = self.config.inner, P(self.config.inner.axis_name)

        def local(shared: Shared, own: Common) -> GroupModel:
            form, agreed, anchor = shared.form, shared.model_state, shared.anchor
            model = alone(self.config.model_of(own, form))
            state, params = at_agreed(form, model.model_state, agreed), model.params
            after = form.whole(anchor)
            # The two differ by rounding, and in chunks that were refused.
            points = moved(model.points, params, change(params, after))
            return stacked(GroupModel(after, state, points))

        return jax.jit(config.on_mesh(local, (P(), own), own))


def _kind(state: LocalState, number: int | None) -> StepKind:
    """Returns the kind of a step with this chunk, or with none, beside it."""
    kind = StepKind.of(number, state.shared.form.chunks)
    # Nothing is to be reported beside the first of all steps.
    return kind if state.position.reported else kind._replace(reports=False)


def parted(
    state: LocalState, kind: StepKind, number: int | None
) -> tuple[Moves, RoundReads]:
    """Returns what a kind of step replaces and reads of a state."""
    shared, own, due = state.shared, state.own, None
    steps = state.position.reported
    if not isinstance(steps, jax.ShapeDtypeStruct):
        steps = np.int32(steps)  # a copy of a state may have an array
    if number is not None:
        due = ChunkState(
            anchor=shared.anchor[number],
            outer=shared.outer[number],
            codec_states=own.codec_states[number],
        )
    reads = RoundReads(
        number=None if number is None else np.int32(number),
        refused=None if number is None else shared.refused,
        steps=None if number is None else steps,
        agreed=shared.model_state if kind.reports else None,
        form=shared.form,
    )
    return Moves(own.local, own.reported, due), reads


def _applied(state: LocalState, number: int | None, outcome: Outcome) -> LocalState:
    """Returns the state with what a program has made of a chunk."""
    shared, own = state.shared, state.own
    if number is not None and outcome.due is not None:
        due = outcome.due
        assert outcome.refused is not None
        shared = shared._replace(
            anchor=_with(shared.anchor, number, due.anchor),
            outer=_with(shared.outer, number, due.outer),
            refused=outcome.refused,
        )
        states = _with(own.codec_states, number, due.codec_states)
        own = own._replace(codec_states=states)
    if outcome.arrival is not None:
        shared = shared._replace(model_state=outcome.agreed)
    own = own._replace(local=with_model(own.local, outcome.model))
    return LocalState(shared, own, state.position)


def _with(items: tuple[Item, ...], number: int, item: Item) -> tuple[Item, ...]:
    return (*items[:number], item, *items[number + 1 :])

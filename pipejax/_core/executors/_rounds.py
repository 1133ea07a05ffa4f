"""Runs local steps as XLA programs, each with at most one chunk of an exchange.

A step of a round is one program: the inner step of every group and, if a round is under
way, the exchange of a chunk, whose collectives have the inner step beside them. The
number of the chunk is an argument, so that one program serves all chunks. The last step
of a round and the step in which the last chunk arrives are other programs.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Passengers, Reduced
from pipejax._core.message import codec_states as codec_states_of_device
from pipejax._core.rounds import (
    Form,
    GroupState,
    LocalState,
    Position,
    RoundInfo,
    Shared,
    arrived,
    at_anchor,
    begun,
    chunked,
    exchange,
    inner_step,
    merged,
    reporting,
)
from pipejax._core.step import (
    Common,
    Inputs,
    StepInfo,
    Trainable,
    info_of,
    inputs_over,
)
from pipejax._internal.types import Keys, ModelState

from ._config import StepConfig
from ._interleave import interleave
from ._options import options_for
from ._turns import hand_on, wait_turn


class StepKind(NamedTuple):
    """What a step does besides training. There is a program for each kind."""

    exchanges: bool  # a chunk of the round before
    merges: bool  # the last chunk arrives, and groups move by the corrections
    begins: bool  # a round ends, and its exchange begins


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """Executor of local steps.

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

    def init(
        self,
        params: optax.Params,
        model_state: ModelState,
        rng: Keys,
        report: Passengers,
    ) -> LocalState:
        """Returns the state in which all groups begin at the same parameters."""
        form = Form(params)

        def local(
            params: optax.Params, model_state: ModelState, rng: Keys
        ) -> tuple[Shared, GroupState]:
            trainable = Trainable(params, self.config.step.settings.tx.init(params))
            zero = jnp.zeros((), jnp.int32)
            anchor = chunked(params, self.chunks)
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), report)
            own = GroupState(
                local=Common(trainable, model_state, rng, zero, zero),
                buffer=jax.tree.map(jnp.zeros_like, anchor),
                reported=(empty, empty),
                codec_states=self._codec_states(anchor),
            )
            return Shared(anchor, self.outer_tx.init(anchor), form), _stacked(own)

        made = jax.jit(self.config.on_mesh(local, (P(), P(), P()), (P(), self._own)))
        shared, own = made(params, model_state, rng)
        return LocalState(shared, own, _start())

    def step(self, state: LocalState, inputs: Inputs) -> tuple[LocalState, RoundInfo]:
        """Takes one step: dispatches its program, and does not wait for it."""
        taken, left = map(int, state.position)
        kind = StepKind(left > 0, left == 1, taken + 1 == self.sync_every)
        wait_turn(self.config.mesh, state.own.local.step)
        number = np.int32(self.chunks - left)
        args = state.shared, state.own, inputs, number
        shared, own, info = self._program(kind)(*args)
        hand_on(self.config.mesh, info)
        taken, left = taken + 1, max(left - 1, 0)
        if kind.begins:
            taken, left = 0, self.overlap_steps
        return LocalState(shared, own, _position(taken, left)), info

    def drain(self, state: LocalState) -> LocalState:
        """Exchanges what is left of a round, and then the progress since."""
        taken, left = map(int, state.position)
        wait_turn(self.config.mesh, state.own.local.step)
        shared, own = self._drain(left, taken > 0)(state.shared, state.own)
        hand_on(self.config.mesh, own)
        return LocalState(shared, own, _start())

    def lower(self, state: LocalState, inputs: Inputs) -> jax.stages.Lowered:
        """Returns the lowered program of a step that exchanges a chunk."""
        kind = StepKind(exchanges=self.overlap_steps > 0, merges=False, begins=False)
        args = state.shared, state.own, inputs, np.int32(0)
        return self._program(kind).lower(*args)

    @property
    def _own(self) -> P:
        return P(self.config.axis_name)

    def _codec_states(self, anchor: Any) -> Any:
        chunk = jax.tree.map(lambda rows: rows[0], anchor)
        like = Message(chunk, None, None)
        return codec_states_of_device(like, self.config.sums_by, self.config.axis_name)

    @functools.cached_property
    def _programs(self) -> dict[Any, jax.stages.Wrapped]:
        return {}

    def _program(self, kind: StepKind) -> jax.stages.Wrapped:
        """Returns the program of a kind of step, made once."""
        if kind not in self._programs:
            own, of_inputs = self._own, inputs_over(self.config.axis_name)
            whole: Any = P()
            each: Any = own
            infos = RoundInfo(*[whole] * 4, *[each] * 4)
            local = self.config.on_mesh(
                functools.partial(self._local_step, kind),
                (P(), own, of_inputs, P()),
                (P(), own, infos),
            )
            options = options_for(self.config.mesh, at_once=False).kept
            self._programs[kind] = jax.jit(
                local,
                in_shardings=(None, None, self.config.inputs, None),
                compiler_options=options,
            )
        return self._programs[kind]

    def _drain(self, left: int, progress: bool) -> jax.stages.Wrapped:
        """Returns the program of a drain, made once."""
        key = "drain", left, progress
        if key not in self._programs:
            local = functools.partial(self._local_drain, left, progress)
            specs = P(), self._own
            self._programs[key] = jax.jit(self.config.on_mesh(local, specs, specs))
        return self._programs[key]

    def _local_step(
        self,
        kind: StepKind,
        shared: Shared,
        own: GroupState,
        inputs: Inputs,
        number: jax.Array,
    ) -> tuple[Shared, GroupState, RoundInfo]:
        """Runs one group's part of a step."""
        own, step, reduced = _alone(own), self.config.step, None
        compute = functools.partial(inner_step, step)
        if kind.exchanges:
            by, axis = self.config.sums_by, self.config.axis_name
            begin, before = exchange(own, number, by, axis), own.codec_states
            value, after, (local, info, message) = interleave(
                begin.start, before, begin.stages, compute, own.local, inputs
            )
            reduced, states = begin.finish(value, after, before)
            own = own._replace(codec_states=states)
            shared, own = self._arrived(shared, own, number, reduced)
        else:
            local, info, message = compute(own.local, inputs)
        own = reporting(own._replace(local=local), message, self.sync_every)
        if kind.merges:
            own = merged(own)
        if kind.begins:
            own = begun(shared, own, self.chunks)
            if not self.overlap_steps:
                shared, own, reduced = self._exchanged(shared, own, range(1))
                own = merged(own)
        came = kind.merges or (kind.begins and not self.overlap_steps)
        return shared, _stacked(own), self._info(info, reduced if came else None, own)

    def _local_drain(
        self, left: int, progress: bool, shared: Shared, own: GroupState
    ) -> tuple[Shared, GroupState]:
        """Runs one group's part of a drain."""
        own = _alone(own)
        if left:
            rest = range(self.chunks - left, self.chunks)
            shared, own, _ = self._exchanged(shared, own, rest)
            own = merged(own)
        if progress:
            own = begun(shared, own, self.chunks)
            shared, own, _ = self._exchanged(shared, own, range(self.chunks))
        # There is no other progress, and rounding errors end here.
        return shared, _stacked(at_anchor(shared, own))

    def _exchanged(
        self, shared: Shared, own: GroupState, numbers: Iterable[int]
    ) -> tuple[Shared, GroupState, Reduced | None]:
        """Exchanges chunks one after another, with nothing beside them."""
        reduced = None
        for number in numbers:
            by, axis = self.config.sums_by, self.config.axis_name
            place = jnp.int32(number)
            reduced, states = exchange(own, place, by, axis).run(own.codec_states)
            own = own._replace(codec_states=states)
            shared, own = self._arrived(shared, own, place, reduced)
        return shared, own, reduced

    def _arrived(
        self, shared: Shared, own: GroupState, number: jax.Array, reduced: Reduced
    ) -> tuple[Shared, GroupState]:
        args = shared, own, number, reduced, self.config.devices
        return arrived(self.outer_tx, *args)

    def _info(
        self, info: StepInfo, reduced: Reduced | None, own: GroupState
    ) -> RoundInfo:
        if reduced is None:  # no round has arrived
            nothing = Message({}, None, own.reported[1])
            reduced = Reduced.of(nothing, jnp.array(False))
        of_round = info_of(reduced, None, self.config.devices)
        return RoundInfo(
            loss=jnp.asarray(of_round.loss),
            metrics=of_round.metrics,
            weight=jnp.asarray(of_round.weight),
            arrived=jnp.asarray(of_round.arrived),
            local_loss=jnp.asarray(info.loss)[None],
            grad_norm=jnp.asarray(info.grad_norm)[None],
            applied=jnp.asarray(info.applied)[None],
            skipped=jnp.asarray(info.skipped)[None],
        )


def _position(taken: int, left: int) -> Position:
    return Position(np.int32(taken), np.int32(left))


def _start() -> Position:
    return _position(0, 0)


def _alone(own: GroupState) -> GroupState:
    """Returns the arrays of one group, without the axis of groups."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), own)


def _stacked(own: GroupState) -> GroupState:
    return jax.tree.map(lambda x: x[None], own)

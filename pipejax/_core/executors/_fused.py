"""Runs each step as one XLA program, in which the collectives overlap with compute.

This executor is made for GPUs and TPUs, whose compilers can start a collective and go
on with other work. Three things make them do so:

- The stages of the all-reduce are interleaved with the compute.
- The update, which consumes the sum, is kept behind the compute by a barrier.
- The program is compiled with options that allow the overlap.

A step takes the oldest message off the queue and puts a fresh one at its end. The queue
is put together outside the program, so the program copies no message that stays in the
queue. With `donate`, the program of a step may overwrite the state and the queue,
except for the messages that stay. The program of a drain may overwrite all of both.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import (
    InFlight,
    Message,
    emptied,
    joined_states,
    parted_states,
    shift,
    valid_in_drain,
    valid_in_step,
)
from pipejax._core.step import (
    Common,
    Inputs,
    PipelineState,
    StepInfo,
    common_of,
    completed,
    inputs_over,
    state_of,
)
from pipejax._internal.mesh import inner_axes
from pipejax._internal.structures import no_leaf

from ._config import StepConfig
from ._interleave import interleave
from ._options import Options, options_for
from ._run_exchange import delayed_part, run_at_once
from ._turns import in_turn


@dataclasses.dataclass(frozen=True, eq=False)
class Fused:
    """Executor that runs compute, all-reduce and update as one program."""

    config: StepConfig
    reason: str
    name: str = "fused"

    def step(
        self, state: PipelineState, inputs: Inputs
    ) -> tuple[PipelineState, StepInfo, Any]:
        """Takes one step: dispatches its program, and does not wait for it.

        If the mesh has several CPU devices in this process, the call first waits for
        all steps and drains before. The last result says whether all devices are alike,
        if they compare it.
        """
        leaving, staying = _parted(state.in_flight)
        program = self._programs[not _is_traced(state)]
        args = common_of(state), leaving, staying, inputs
        common, entering, info, alike = self._run(state, program, *args)
        common = completed(common, common_of(state))
        in_flight = entering._replace(pending=(*staying, *entering.pending))
        return state_of(common, in_flight, state.calls), info, alike

    def drain(
        self, state: PipelineState
    ) -> tuple[PipelineState, tuple[StepInfo, ...], Any]:
        """Reduces and applies everything in flight, in order, in one program."""
        args = common_of(state), state.in_flight
        common, in_flight, infos, alike = self._run(state, self._drain, *args)
        common = completed(common, common_of(state))
        return state_of(common, in_flight, state.calls), infos, alike

    def _run(self, state: PipelineState, program: Any, *args: Any) -> Any:
        """Dispatches a program in its turn, unless it is part of one that is traced."""
        if _is_traced(state):
            return program(*args)
        # The next step may overwrite all results but infos.
        infos = operator.itemgetter(slice(2, None))
        return in_turn(self.config.mesh, program, *args, ended=infos)

    def lower(
        self, state: PipelineState, inputs: Inputs, *, own_options: bool = True
    ) -> jax.stages.Lowered:
        """Returns the lowered program of a step, with its options or without."""
        in_flight = _parted(state.in_flight)
        return self._programs[own_options].lower(common_of(state), *in_flight, inputs)

    @property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh of the step, on which the messages are also summed."""
        return self.config.mesh

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the options for devices and width that the compiler accepts."""
        return self.options.kept

    @functools.cached_property
    def options(self) -> Options:
        """Returns the accepted options, and those that the compiler refused."""
        config = self.config
        late = config.width > 1 and config.step.settings.delayed is None
        grouped = inner_axes(config.mesh, config.axis_name)
        return options_for(config.mesh, mixed=late and bool(grouped))

    @functools.cached_property
    def _programs(self) -> dict[bool, jax.stages.Wrapped]:
        """Returns the program of a step with its options (`True`), and without them.

        Another program that traces it has options of its own.
        """
        config = self.config
        leaving, staying = _parted(config.queue_specs)
        rest = leaving, staying, inputs_over(config.axis_name)
        program = functools.partial(
            jax.jit,
            config.on_state(self._local_step, rest, leaving, P(config.axis_name)),
            in_shardings=(None, None, None, config.inputs),
            donate_argnums=self._donated,
        )
        return {
            True: program(compiler_options=self.compiler_options),
            False: program(),
        }

    @functools.cached_property
    def _drain(self) -> jax.stages.Wrapped:
        queue, each = self.config.queue_specs, P(self.config.axis_name)
        program = self.config.on_state(self._local_drain, (queue,), queue, each)
        return jax.jit(program, donate_argnums=self._donated)

    @property
    def _donated(self) -> tuple[int, ...]:
        """Returns the numbers of the arguments that a program may overwrite."""
        return (0, 1) if self.config.donate else ()

    def _local_step(
        self,
        state: Common,
        leaving: InFlight,
        staying: tuple[Message, ...],
        inputs: Inputs,
    ) -> tuple[Common, InFlight, StepInfo, Any]:
        """Runs one device's part of a step."""
        config, step, trained = self.config, self.config.step, state.trainable
        # Only the oldest message may be overwritten, so it is an argument of its own.
        in_flight = leaving._replace(pending=(*leaving.pending, *staying))
        before, others = parted_states(in_flight.codec_states)
        valid = valid_in_step(in_flight.filled[0], config.width - 1)
        mark = config.mark(inputs.batch)

        def compute(state: Common, in_flight: InFlight, inputs: Inputs) -> Any:
            fresh, computed = step.compute(state, in_flight, inputs)
            # Gradients that are not delayed are exchanged beside the rest of the
            # backward pass, as at width 1.
            at_once, after = run_at_once(config, computed, others)
            if at_once is not None:
                fresh = delayed_part(config, fresh, at_once)
            return fresh, computed, at_once, after

        if config.width == 1:
            fresh, computed, at_once, others = compute(state, in_flight, inputs)
            exchange = config.exchange(trained, fresh, valid, mark)
            reduced, after = exchange.run(before)
        else:
            oldest = in_flight.pending[0]
            exchange = config.exchange(trained, oldest, valid, mark)
            # The sum that is due needs nothing of the compute, which hides it.
            value, after, computed_at_once = interleave(
                exchange.start,
                before,
                exchange.stages,
                compute,
                *(state, in_flight, inputs),
                early=exchange.early,
            )
            fresh, computed, at_once, others = computed_at_once
            reduced = exchange.end(value)
        state, info = step.apply(state, computed, reduced, at_once)
        queue = shift(in_flight, fresh, joined_states(after, others))
        state = config.result(state, computed, reduced.sum.changes)
        # Messages that stay in the queue are not results, which would be copies.
        queue = queue._replace(pending=queue.pending[-1:])
        return state, queue, info, reduced.alike

    def _local_drain(
        self, state: Common, in_flight: InFlight
    ) -> tuple[Common, InFlight, tuple[StepInfo, ...], Any]:
        """Runs one device's part of a drain."""
        step, infos, alike = self.config.step, [], []
        states, others = parted_states(in_flight.codec_states)
        changes = no_leaf(state.model_state)
        for age, message in enumerate(in_flight.pending):
            valid = valid_in_drain(in_flight, age)
            args = state.trainable, message, valid, self.config.mark(None)
            exchange = self.config.exchange(*args)
            reduced, states = exchange.run(states)
            state, info = step.apply(state, None, reduced, None)
            infos.append(info)
            alike.append(reduced.alike)
            changes = message.changes
        if step.settings.gather_codec is not None:
            # A drain leaves what is gathered as it is in the master parameters.
            assert step.gather is not None
            trained = step.gather(state.trainable, self.config.sums_by)
            state = state._replace(trainable=trained)
        state = self.config.result(state, None, changes)
        queue = emptied(in_flight, joined_states(states, others))
        return state, queue, tuple(infos), tuple(alike)


def _is_traced(state: PipelineState) -> bool:
    return isinstance(state.step, jax.core.Tracer)


def _parted(in_flight: InFlight) -> tuple[InFlight, tuple[Message, ...]]:
    """Returns the queue with the oldest message alone, and the other messages."""
    oldest, staying = in_flight.pending[:1], in_flight.pending[1:]
    return in_flight._replace(pending=oldest), staying

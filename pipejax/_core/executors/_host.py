"""Runs the all-reduce on a communication thread beside the compute, as in the paper.

A step is three programs: compute, exchange and update (`_programs`). The caller
dispatches compute and update, and a communication thread dispatches the exchange. This
executor is made for

- CPUs of several processes, where a collective blocks the program that it is in. No
  other program may then have a collective between processes.
- GPUs on plain Ethernet. Their gradients are summed by the CPUs' own collectives,
  whatever XLA schedules on the GPUs.

The thread is given a message as soon as its compute is dispatched. The result is waited
for K-1 steps later, so up to K-1 exchanges are under way while a step computes. The
state holds only the messages, which no program overwrites, and not the exchanges. If a
state comes from elsewhere, such as a checkpoint, its exchanges are started when it is
stepped.

All train steps of a process share the thread. An exchange also waits for the program
that the caller has dispatched last, and so for all programs that the caller has
dispatched before it, among them fused steps and an evaluation. The order in which
collectives are launched is therefore the order in which the caller asks for them.

Reference:
  Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

import copy
import dataclasses
import functools
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from pipejax._core.message import (
    InFlight,
    Mark,
    Message,
    Reduced,
    as_number,
    joined_states,
    parted_states,
    valid_at_once,
    valid_in_step,
)
from pipejax._core.step import (
    Common,
    Computed,
    Inputs,
    PipelineState,
    StepInfo,
    Trainable,
    common_of,
    completed,
    state_of,
    without_trainable,
)
from pipejax._internal.communication_thread import join, submit
from pipejax._internal.structures import identical
from pipejax._internal.types import CodecStates, Tree

from ._by_copy import reduction_mesh
from ._config import StepConfig
from ._own_collectives import OwnCollectiveError, OwnCollectives
from ._programs import Programs, programs_of


class Base(NamedTuple):
    """The codec states and pieces from which an exchange starts.

    Attributes:
      updated: The pieces that the exchange of a sharded optimizer updates. `None`
        without one.
    """

    states: CodecStates
    updated: Trainable | None


class Begun(NamedTuple):
    """An exchange that has been started.

    Attributes:
      base: `None` if the exchange starts from the result of the one before it.
      result: The future of the reduced message and of the codec states after it.
    """

    message: Message
    base: Base | None
    result: Future[tuple[Reduced, CodecStates]]


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """Executor that runs compute and update as programs, and exchanges on a thread."""

    config: StepConfig
    reason: str
    name: str = "host"
    # Exchanges that have been started and whose results are not used yet, oldest first.
    _begun: list[Begun] = dataclasses.field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> "Host":
        """Returns an executor of the same step, which has started no exchange."""
        config = copy.deepcopy(self.config, memo)
        return Host(config, self.reason, self.name)

    def step(
        self, state: PipelineState, inputs: Inputs
    ) -> tuple[PipelineState, StepInfo, None]:
        """Takes one step, and waits for nothing but the result that is due.

        The thread checks whether all devices are alike.
        """
        self._check(state)
        common, in_flight = common_of(state), state.in_flight
        self._no_own(self._programs.compute, common, _bare(in_flight), inputs)
        fresh, computed = self._programs.compute(common, _bare(in_flight), inputs)
        before, others = parted_states(in_flight.codec_states)
        at_once, others = self._exchanged_at_once(computed, others)
        if at_once is not None and self.config.step.settings.at_once is not None:
            fresh = self._programs.delayed(fresh, at_once)
        pending = (*in_flight.pending, fresh)
        # All but the last were started by earlier steps, if this executor ran them.
        mark = self.config.mark(inputs.batch)
        first, *later = self._exchanges(state, before, pending, fresh, mark)
        reduced, states = self._waited(first.result)
        # The exchange that is now the oldest starts from what this step returns. The
        # next step compares it with its state, to see whether the exchange is of this
        # run.
        base = Base(states, reduced.updated)
        self._begun[:] = [x._replace(base=base) for x in later[:1]] + later[1:]
        args = computed._replace(at_once=None), reduced, at_once, in_flight.filled
        common, filled, info = self._update(common, *args)
        queue = InFlight(pending[1:], filled, joined_states(states, others))
        return state_of(common, queue, state.calls), info, None

    def drain(
        self, state: PipelineState
    ) -> tuple[PipelineState, tuple[StepInfo, ...], None]:
        """Waits for the exchange of every message in flight, in order, and applies it.

        The thread is idle when the method returns.
        """
        self._check(state)
        common, in_flight, infos = common_of(state), state.in_flight, list[StepInfo]()
        empty = self._programs.empty(_bare(in_flight))
        # All sums are there before the first program overwrites a donated state.
        # Every message is summed, also the zeros of a pipeline that is not full: all
        # processes launch the same collectives.
        states, others = parted_states(in_flight.codec_states)
        mark = self.config.mark(None)
        begun = self._exchanges(state, states, in_flight.pending, empty, mark)
        results = [self._waited(exchange.result) for exchange in begun]
        if results:
            last, states = results[-1]
            if last.updated is not None:
                whole = submit(self._programs.gather, last.updated).result()
                results[-1] = last._replace(updated=whole), states
        elif self.config.step.settings.gather_codec is not None:
            whole = submit(self._programs.gather, common.trainable).result()
            common = common._replace(trainable=whole)
        for reduced, _ in results:
            args = None, reduced, None, in_flight.filled
            common, _, info = self._update(common, *args)
            infos.append(info)
        self._begun.clear()
        join()
        empty = empty._replace(codec_states=joined_states(states, others))
        return state_of(common, empty, state.calls), tuple(infos), None

    def forget(self) -> None:
        """Drops the exchanges of a run that goes on with another executor."""
        self._begun.clear()

    def lower(
        self, state: PipelineState, inputs: Inputs, *, own_options: bool = True
    ) -> jax.stages.Lowered:
        """Returns the lowered program that computes, which has no compiler options."""
        del own_options
        compute = self._programs.compute
        return compute.lower(common_of(state), _bare(state.in_flight), inputs)

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh if it consists of CPUs, or else a mesh of CPUs beside it."""
        return reduction_mesh(self.config.mesh, self.config.axis_name)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns no options, because no program overlaps a collective with compute."""
        return {}

    @functools.cached_property
    def _programs(self) -> Programs:
        return programs_of(self.config, self.reduction_mesh)

    def _exchanges(
        self,
        state: PipelineState,
        states: CodecStates,
        pending: tuple[Message, ...],
        dispatched: Tree,
        mark: Mark,
    ) -> list[Begun]:
        """Returns the exchanges of all messages, in order, and starts missing ones.

        One that was started before is used if it exchanges the same arrays from the
        same base, and if all exchanges before it are used.

        `dispatched` is the result of the program that the caller has dispatched last,
        and `mark` that of the call, for a message that it has made.
        """
        sharded, filled = self.config.step.shards_optimizer, state.in_flight.filled
        updated = state.trainable if sharded else None
        base = Base(states, updated)
        known, found = list(self._begun), list[Begun]()
        if known and not identical(known[0].base, base):
            known = []
        for age, message in enumerate(pending):
            if known and identical(known[0].message, message):
                found.append(known.pop(0))
                continue
            known = []
            before = found[-1].result if found else base
            fresh = age == self.config.width - 1
            own = mark if fresh else self.config.mark(None)
            found.append(self._begin(message, before, filled, age, dispatched, own))
        return found

    def _begin(
        self,
        message: Message,
        before: Base | Future[tuple[Reduced, CodecStates]],
        filled: jax.Array,
        age: int,
        dispatched: Tree,
        mark: Mark,
    ) -> Begun:
        """Hands an exchange to the thread, which runs it after all earlier ones."""
        length = self.config.width - 1
        # A program that sums its own arguments waits for them anyway.
        awaited = None if dispatched is message else dispatched

        def exchange() -> tuple[Reduced, CodecStates]:
            jax.block_until_ready(awaited)
            states, updated = before if isinstance(before, Base) else _after(before)
            # When a fresh message is due, the whole queue is valid.
            count = length if age == length else as_number(filled)
            valid = valid_in_step(count, length, age)
            return self._programs.exchange(updated, message, states, valid, mark)

        base = before if isinstance(before, Base) else None
        return Begun(message, base, submit(exchange))

    def _exchanged_at_once(
        self, computed: Computed, states: CodecStates
    ) -> tuple[Reduced | None, CodecStates]:
        """Exchanges the gradients that are not delayed, and waits for the result.

        The thread has exchanges of earlier steps before it, and none of this step.
        """
        if computed.at_once is None:
            return None, states
        args = None, computed.at_once, states, valid_at_once()
        return self._waited(submit(self._programs.exchange_at_once, *args))

    def _update(
        self,
        state: Common,
        computed: Computed | None,
        reduced: Reduced,
        at_once: Reduced | None,
        filled: jax.Array,
    ) -> tuple[Common, jax.Array, StepInfo]:
        """Runs the program that applies a reduced message, without waiting for it.

        Also returned is the number of valid messages in the queue after a step.
        """
        updated, reduced = reduced.updated, reduced._replace(updated=None)
        # With a sharded optimizer, the exchange has updated its pieces. The program
        # neither reads nor returns them, because it may overwrite its state, and the
        # thread works on them.
        if updated is not None:
            state = without_trainable(state)
        args = state, computed, reduced, at_once, filled
        self._no_own(self._programs.update, *args)
        after, filled, info = self._programs.update(*args)
        state = completed(after, state)
        if updated is not None:
            state = state._replace(trainable=updated)
        return state, filled, info

    def _check(self, state: PipelineState) -> None:
        """Raises an error for a traced state, and that of an exchange that failed."""
        _check_concrete(state)
        for exchange in list(self._begun):
            if exchange.result.done():
                self._waited(exchange.result)

    def _no_own(self, program: Any, *args: Any) -> None:
        try:
            self._own_collectives.check(program, *args)
        except OwnCollectiveError:
            self._begun.clear()
            raise

    @functools.cached_property
    def _own_collectives(self) -> OwnCollectives:
        return OwnCollectives(self.config.mesh)

    def _waited(
        self, result: Future[tuple[Reduced, CodecStates]]
    ) -> tuple[Reduced, CodecStates]:
        """Waits for a reduced message and the codec states after it."""
        try:
            return result.result()
        except Exception:
            self._begun.clear()
            raise


def _after(exchange: Future[tuple[Reduced, CodecStates]]) -> Base:
    """Returns the base of the exchange that follows another."""
    reduced, states = exchange.result()
    return Base(states, reduced.updated)


def _bare(in_flight: InFlight) -> InFlight:
    """Returns the queue without codec states, which may lie on other devices."""
    return in_flight._replace(codec_states={})


def _check_concrete(state: PipelineState) -> None:
    if isinstance(state.step, jax.core.Tracer):
        raise ValueError(
            "`executor` must be 'fused' for a step inside jit or scan: the host"
            " executor runs three programs and a thread; got 'host'. Call `train.step`"
            " outside, or make the step with executor='fused'."
        )

"""Runs the all-reduce on a communication thread beside the compute, as in the paper.

A step is three programs: compute, reduce and update. The caller dispatches compute and
update, and a communication thread dispatches reduce. This executor is made for

- CPUs of several processes, where a collective blocks the program that it is in. No
  other program may then have a collective between processes.
- GPUs on plain Ethernet. Their gradients are summed by the CPUs' own collectives,
  whatever XLA schedules on the GPUs.

The thread is given a message as soon as its compute is dispatched. Its sum is waited
for K-1 steps later, so up to K-1 reductions are under way while a step computes. The
state holds only the messages, which no program overwrites, and not the reductions. If a
state comes from elsewhere, such as a checkpoint, its reductions are started when it is
stepped.

All train steps of a process share the thread. A reduction also waits for the program
that the caller has dispatched last, and so for all programs that the caller has
dispatched before it, among them fused steps and an evaluation. The order in which
collectives are launched is therefore the order in which the caller asks for them.

Reference:
  Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
"""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import (
    InFlight,
    Message,
    Reduced,
    deviation,
    emptied,
    entered,
    valid_in_step,
)
from pipejax._core.step import (
    Batch,
    Computed,
    PipelineState,
    StepInfo,
    Trainable,
    shared,
    state_data_specs,
    without_trainable,
)
from pipejax._internal.mesh import on_mesh_by
from pipejax._internal.types import Tree

from ._config import StepConfig
from ._own_collectives import OwnCollectiveError, check_no_own, spans_cpu_processes
from ._reduce import Reduce, make_gather, make_reduce, make_update, reduction_mesh
from ._thread import join, submit


class Begun(NamedTuple):
    """A reduction that has been started.

    Attributes:
      before: What the reduction starts from: the codec states, and with a sharded
        optimizer the pieces that it updates. `None` if these are what the reduction
        before it returns.
      sum: The future of the sum and of the codec states after it.
    """

    message: Message
    before: tuple[Any, Any] | None
    sum: Future[tuple[Reduced, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """Executor that runs compute and update as programs, and reduces on a thread."""

    config: StepConfig
    reason: str
    name: str = "host"
    # Reductions that have been started and whose sums are not used yet, oldest first.
    _begun: list[Begun] = dataclasses.field(default_factory=list)
    # Programs found to have no collective of their own, with their arguments' form.
    _checked: set[Any] = dataclasses.field(default_factory=set)

    def __deepcopy__(self, memo: Any) -> "Host":
        """Returns an executor of the same step, which has started no reduction."""
        config = copy.deepcopy(self.config, memo)
        return Host(config, self.reason, self.name)

    def step(
        self, state: PipelineState, batch: Batch
    ) -> tuple[PipelineState, StepInfo]:
        """Takes one step, and waits for nothing but the sum that is due."""
        _check_concrete(state)
        self._raise_failures()
        common, in_flight = shared(state), state.in_flight
        sharded = self.config.step.shards_optimizer
        self._check_no_own(self._compute, common, _bare(in_flight), batch)
        fresh, computed = self._compute(common, _bare(in_flight), batch)
        pending = (*in_flight.pending, fresh)
        # All but the last were started by earlier steps, if this executor ran them.
        first, *others = self._reductions(state, pending, fresh)
        total, states = self._result(first)
        # With a sharded optimizer, the exchange on the thread has updated `trained`.
        # The program of the update neither reads nor returns it.
        trained, total = total.updated, total._replace(updated=None)
        before = states, trained
        # The reduction that is now the oldest starts from what this step returns. The
        # next step compares it with its state, to see whether the reduction is of this
        # run.
        self._begun[:] = [x._replace(before=before) for x in others[:1]] + others[1:]
        # A program may overwrite its state. The pieces that the thread works on must
        # not be in it.
        due, rest = _due(in_flight), without_trainable(common) if sharded else common
        self._check_no_own(self._update, rest, computed, total, due)
        rest, queue, info = self._update(rest, computed, total, due)
        queue = queue._replace(pending=pending[1:], codec_states=states)
        rest = rest if trained is None else rest._replace(trainable=trained)
        return rest._replace(in_flight=queue, calls=state.calls), info

    def drain(self, state: PipelineState) -> tuple[PipelineState, tuple[StepInfo, ...]]:
        """Waits for the sum of every message in flight, in order, and applies it.

        The thread is idle when the method returns.
        """
        _check_concrete(state)
        self._raise_failures()
        common, in_flight = shared(state), state.in_flight
        sharded = self.config.step.shards_optimizer
        empty = self._emptied(_bare(in_flight))
        # All sums are there before the first program overwrites a donated state.
        # Every message is summed, also the zeros of a pipeline that is not full: all
        # processes launch the same collectives.
        begun = self._reductions(state, in_flight.pending, empty)
        sums = [self._result(reduction) for reduction in begun]
        states, infos = sums[-1][1] if sums else in_flight.codec_states, []
        trained = sums[-1][0].updated if sums else common.trainable
        if sums and sharded:
            trained = submit(self._gather, trained).result()
        rest = without_trainable(common) if sharded else common
        for age, (total, _) in enumerate(sums):
            total = total._replace(updated=None)
            self._check_no_own(self._apply[age], rest, total, in_flight.filled)
            rest, info = self._apply[age](rest, total, in_flight.filled)
            infos.append(info)
        self._begun.clear()
        join()
        rest = rest._replace(trainable=trained) if sharded else rest
        empty = empty._replace(codec_states=states)
        return rest._replace(in_flight=empty, calls=state.calls), tuple(infos)

    def lower(self, state: PipelineState, batch: Batch) -> jax.stages.Lowered:
        """Returns the lowered program that computes.

        It has no collective of the exchange.
        """
        return self._compute.lower(shared(state), _bare(state.in_flight), batch)

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh if it consists of CPUs, or else a mesh of CPUs beside it."""
        return reduction_mesh(self.config.mesh, self.config.axis_name)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns no options, because no program overlaps a collective with compute."""
        return {}

    def _reductions(
        self, state: PipelineState, pending: tuple[Message, ...], dispatched: Any
    ) -> list[Begun]:
        """Returns the reductions of all messages, in order, and starts missing ones.

        A reduction that was started before is used if it sums the same arrays from the
        same codec states and pieces, and if all reductions before it are used.

        Args:
          dispatched: The result of the program that the caller has dispatched last.
        """
        in_flight = state.in_flight
        trained = state.trainable if self.config.step.shards_optimizer else None
        known, found = list(self._begun), list[Begun]()
        before = in_flight.codec_states, trained
        if known and not _identical(known[0].before, before):
            known = []
        for age, message in enumerate(pending):
            if known and _identical(known[0].message, message):
                found.append(known.pop(0))
            else:
                known = []
                last = found[-1].sum if found else None
                given = before if last is None else None
                filled = in_flight.filled
                begun = self._start(message, given, last, filled, age, dispatched)
                found.append(begun)
        return found

    def _start(
        self,
        message: Message,
        before: Tree,
        last: Any,
        filled: jax.Array,
        age: int,
        dispatched: Any,
    ) -> Begun:
        """Hands a reduction to the thread, which runs it after all earlier ones.

        Args:
          before: What the first reduction starts from, or `None` for others.
          last: The future of the reduction before it, or `None` if it is the first.
          filled: The number of real messages in the queue that the executor was given.
          age: The place of the message in the queue. 0 is the oldest.
          dispatched: The result of the program that the caller has dispatched last.
        """
        least = self.config.width - 1 - age
        # A program that sums its own arguments waits for them anyway.
        awaited = None if dispatched is message else dispatched
        # `with jax.enable_x64()` acts on the caller's thread alone. If the setting were
        # not passed on, the other thread would sum float64 in float32.
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]

        def reduce() -> tuple[Reduced, Any]:
            jax.block_until_ready(awaited)
            if last is None:
                states, trained = before
            else:
                reduced, states = last.result()
                trained = reduced.updated
            with jax.enable_x64(x64):
                if trained is None:
                    total, after = self._reduce(message, states)
                else:
                    update = self._reduce_and_update(age)
                    total, after = update(trained, message, states, filled)
            stateless = not jax.tree.leaves(states)
            # The zeros of a pipeline that is not full must not change the codec states.
            real = stateless or least == 0 or _first(filled) >= least
            return total, after if real else states

        return Begun(message, before, submit(reduce))

    def _check_no_own(self, program: Any, *args: Any) -> None:
        """Checks that a program has no collective between processes of its own.

        The check is made on CPUs of several processes only. It compiles the program, as
        the first call would, and raises an `OwnCollectiveError` before the program is
        dispatched. For arguments of another form, a program is compiled and checked
        again.
        """
        if not spans_cpu_processes(self.config.mesh):
            return
        leaves, structure = jax.tree.flatten(args)
        form = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if (program, form) in self._checked:
            return
        try:
            check_no_own(program.lower(*args).compile(), self.config.mesh)
        except OwnCollectiveError:
            self._begun.clear()
            raise
        self._checked.add((program, form))

    def _raise_failures(self) -> None:
        """Raises the error of any reduction of an earlier step that has failed."""
        for reduction in list(self._begun):
            if reduction.sum.done():
                self._result(reduction)

    def _result(self, reduction: Begun) -> tuple[Reduced, Any]:
        """Waits for a sum and the codec states after it.

        After a failure, the next step starts all reductions anew.
        """
        try:
            return reduction.sum.result()
        except Exception:
            self._begun.clear()
            raise

    @functools.cached_property
    def _reduce(self) -> Reduce:
        """Returns the function that sums a message and waits for the sum."""
        return make_reduce(self.config, self.reduction_mesh)

    @functools.cached_property
    def _reduce_and_update(self) -> Callable[[int], Any]:
        """Returns the programs that exchange a message and update pieces, by age."""
        return functools.cache(functools.partial(make_update, self.config))

    @functools.cached_property
    def _gather(self) -> Callable[[Trainable], Trainable]:
        """Returns the program that gathers parameters as they are."""
        return make_gather(self.config)

    @functools.cached_property
    def _compute(self) -> jax.stages.Wrapped:
        """Returns the program that makes a message."""
        compute, per_device = self.config.step.compute, P(self.config.axis_name)

        def specs(state: PipelineState, *_: Any) -> tuple[Any, Any]:
            common = state_data_specs(state, self.config.axis_name)
            return (common, per_device, per_device), (per_device, P())

        mapped = on_mesh_by(specs, compute, self.config.mesh, self.config.axis_name)
        return jax.jit(mapped, in_shardings=(None, None, self.config.batches))

    @functools.cached_property
    def _update(self) -> jax.stages.Wrapped:
        """Returns the program that applies the sum that is due, if it has arrived."""
        per_device, config = P(self.config.axis_name), self.config

        def update(
            state: PipelineState, computed: Computed, total: Reduced, due: InFlight
        ) -> tuple[PipelineState, InFlight, StepInfo]:
            real = valid_in_step(due.filled, config.width - 1)
            total = total._replace(arrived=real.message)
            state, info = config.step.apply(state, computed, total)
            spread = deviation(due, total, config.axis_name)
            queue = InFlight((), entered(due.filled, config.width - 1), {}, spread)
            return state, queue, info

        specs = (P(), P(), P(), per_device), (P(), per_device, P())
        mapped = config.on_mesh(update, *specs)
        return jax.jit(mapped, donate_argnums=(0,) if config.donate else ())

    @functools.cached_property
    def _apply(self) -> list[jax.stages.Wrapped]:
        """Returns the programs that apply a sum in a drain, one for each place."""
        return [self._applying(age) for age in range(self.config.width - 1)]

    def _applying(self, age: int) -> jax.stages.Wrapped:
        """Returns the program that applies the sum of the message at place `age`."""
        per_device, config = P(self.config.axis_name), self.config

        def apply(
            state: PipelineState, total: Reduced, filled: jax.Array
        ) -> tuple[PipelineState, StepInfo]:
            real = valid_in_step(filled, config.width - 1, age)
            return config.step.apply(state, None, total._replace(arrived=real.message))

        mapped = config.on_mesh(apply, (P(), P(), per_device), P())
        return jax.jit(mapped, donate_argnums=(0,) if config.donate else ())

    @functools.cached_property
    def _emptied(self) -> jax.stages.Wrapped:
        """Returns the program that empties the queue."""
        per_device = P(self.config.axis_name)
        return jax.jit(
            self.config.on_mesh(lambda x: emptied(x, {}), (per_device,), per_device)
        )


def _identical(a: Any, b: Any) -> bool:
    """Returns whether two pytrees hold the same arrays, not only equal ones."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def _bare(in_flight: InFlight) -> InFlight:
    """Returns the queue without codec states, which may lie on other devices."""
    return in_flight._replace(codec_states={})


def _due(in_flight: InFlight) -> InFlight:
    """Returns the part of the queue that an update reads.

    The oldest message is in it only if the step feeds deviations back.
    """
    oldest = () if in_flight.deviation is None else in_flight.pending[:1]
    return _bare(in_flight)._replace(pending=oldest)


def _first(filled: jax.Array) -> int:
    """Returns how many messages in the queue are real, as a Python integer."""
    return int(jax.device_get(filled.addressable_data(0))[0])


def _check_concrete(state: PipelineState) -> None:
    """Raises an error if the step is being traced."""
    if isinstance(state.step, jax.core.Tracer):
        raise ValueError(
            "`executor` must be 'fused' for a step inside jit or scan: the host"
            " executor runs three programs and a thread; got 'host'. Call `train.step`"
            " outside, or make the step with executor='fused'."
        )

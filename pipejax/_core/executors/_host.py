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
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import InFlight, Message, Reduced, emptied

from ._config import StepConfig
from ._own_collectives import OwnCollectiveError, check_no_own, spans_cpu_processes
from ._reduce import Reduce, make_reduce, make_spread, make_update, reduction_mesh
from ._thread import join, submit


class Begun(NamedTuple):
    """A reduction that has been started.

    Attributes:
      message: The message that is summed.
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
    """Executor that runs compute and update as programs, and reduces on a thread.

    Attributes:
      config: The step to run.
      reason: Why the executor was chosen.
      name: The name of the executor, `"host"`.
    """

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

    def step(self, state: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Takes one step, and waits for nothing but the sum that is due."""
        _check_concrete(state)
        self._raise_failures()
        self._check_no_own(self._compute, state, _bare(in_flight), batch)
        fresh, left = self._compute(state, _bare(in_flight), batch)
        pending = (*in_flight.pending, fresh)
        # All but the last were started by earlier steps, if this executor ran them.
        first, *others = self._reductions(state, in_flight, pending, fresh)
        total, states = self._result(first)
        learned, total = total.updated, total._replace(updated=None)
        before = states, learned
        self._begun[:] = [x._replace(before=before) for x in others[:1]] + others[1:]
        due, rest = _due(in_flight), state.without_learned()
        self._check_no_own(self._update, rest, left, total, due)
        rest, filled, deviation, info = self._update(rest, left, total, due)
        queue = InFlight(pending[1:], filled, states, deviation)
        return rest.with_learned(learned), queue, info

    def drain(self, state: Any, in_flight: Any) -> tuple[Any, Any, Any]:
        """Waits for the sum of every message in flight, in order, and applies it.

        The thread is idle when the method returns.
        """
        _check_concrete(state)
        self._raise_failures()
        empty = self._emptied(_bare(in_flight))
        # All sums are there before the first program overwrites a donated state.
        begun = self._reductions(state, in_flight, in_flight.pending, empty)
        sums = [self._result(reduction) for reduction in begun]
        states, infos = sums[-1][1] if sums else in_flight.codec_states, []
        learned = sums[-1][0].updated if sums else state.learned
        if sums and learned is not None:
            learned = submit(self._spread, learned).result()
        rest = state.without_learned()
        for age, (total, _) in enumerate(sums):
            total = total._replace(updated=None)
            self._check_no_own(self._apply[age], rest, total, in_flight.filled)
            rest, info = self._apply[age](rest, total, in_flight.filled)
            infos.append(info)
        self._begun.clear()
        join()
        empty = empty._replace(codec_states=states)
        return rest.with_learned(learned), empty, tuple(infos)

    def lower(self, state: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the lowered program that computes.

        It has no collective of the exchange.
        """
        return self._compute.lower(state, _bare(in_flight), batch)

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh if it consists of CPUs, or else a mesh of CPUs beside it."""
        return reduction_mesh(self.config.mesh, self.config.axis_name)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns no options, because no program overlaps a collective with compute."""
        return {}

    def _reductions(
        self,
        state: Any,
        in_flight: InFlight,
        pending: tuple[Message, ...],
        dispatched: Any,
    ) -> list[Begun]:
        """Returns the reductions of all messages, in order, and starts missing ones.

        A reduction that was started before is used if it sums the same arrays from the
        same codec states and pieces, and if all reductions before it are used.

        Args:
          state: The state of the step or drain.
          in_flight: Its queue.
          pending: The messages to sum.
          dispatched: The result of the program that the caller has dispatched last.
        """
        known, found = list(self._begun), list[Begun]()
        before = in_flight.codec_states, state.learned
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
                begun = self._begin(message, given, last, filled, age, dispatched)
                found.append(begun)
        return found

    def _begin(
        self,
        message: Message,
        before: Any,
        last: Any,
        filled: jax.Array,
        age: int,
        dispatched: Any,
    ) -> Begun:
        """Hands a reduction to the thread, which runs it after all earlier ones.

        Args:
          message: The message to sum.
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
                states, learned = before
            else:
                reduced, states = last.result()
                learned = reduced.updated
            with jax.enable_x64(x64):
                if learned is None:
                    total, after = self._reduce(message, states)
                else:
                    update = self._reduce_and_update(age)
                    total, after = update(learned, message, states, filled)
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
    def _spread(self) -> Callable[[Any], Any]:
        """Returns the program that gathers parameters as they are."""
        return make_spread(self.config)

    @functools.cached_property
    def _compute(self) -> jax.stages.Wrapped:
        """Returns the program that makes a message."""
        compute, own = self.config.work.compute, P(self.config.axis_name)

        @functools.wraps(compute)
        def program(state: Any, in_flight: Any, batch: Any) -> Any:
            specs = state.over_data(self.config.axis_name), own, own
            mapped = self.config.on_mesh(compute, specs, (own, P()))
            return mapped(state, in_flight, batch)

        return jax.jit(program, in_shardings=(None, None, self.config.batches))

    @functools.cached_property
    def _update(self) -> jax.stages.Wrapped:
        """Returns the program that applies the sum that is due, if it has arrived."""
        own, last = P(self.config.axis_name), self.config.width - 1

        def local(state: Any, left: Any, total: Any, due: Any) -> Any:
            work, filled = self.config.work, due.filled
            total = total._replace(arrived=filled[0] == last)
            state, info = work.update(state, left, total)
            deviation = work.deviation(due, total)
            return state, jnp.minimum(filled + 1, last), deviation, info

        specs = (P(), P(), P(), own), (P(), own, own, P())
        mapped = self.config.on_mesh(local, *specs)
        return jax.jit(mapped, donate_argnums=(0,) if self.config.donate else ())

    @functools.cached_property
    def _apply(self) -> list[jax.stages.Wrapped]:
        """Returns the programs that apply a sum in a drain, one for each place."""
        return [self._applying(age) for age in range(self.config.width - 1)]

    def _applying(self, age: int) -> jax.stages.Wrapped:
        """Returns the program that applies the sum of the message at place `age`."""
        work, own = self.config.work, P(self.config.axis_name)

        def local(state: Any, total: Any, filled: Any) -> Any:
            arrived = filled[0] >= self.config.width - 1 - age
            return work.update(state, None, total._replace(arrived=arrived))

        mapped = self.config.on_mesh(local, (P(), P(), own), P())
        return jax.jit(mapped, donate_argnums=(0,) if self.config.donate else ())

    @functools.cached_property
    def _emptied(self) -> jax.stages.Wrapped:
        """Returns the program that empties the queue."""
        own = P(self.config.axis_name)
        return jax.jit(self.config.on_mesh(lambda x: emptied(x, {}), (own,), own))


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


def _check_concrete(state: Any) -> None:
    """Raises an error if the step is being traced."""
    if isinstance(state.step, jax.core.Tracer):
        raise ValueError(
            "`executor` must be 'fused' for a step inside jit or scan: the host"
            " executor runs three programs and a thread; got 'host'. Call `train.step`"
            " outside, or make the step with executor='fused'."
        )

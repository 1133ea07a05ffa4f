"""A communication thread beside the compute, as in the paper.

Three programs: compute, reduce, update. The caller dispatches compute and update; a
thread of its own dispatches reduce. For CPUs, where a collective blocks the program it
is in and where no other program may have one between processes; and for GPUs on plain
Ethernet, whose gradients are then summed by the CPUs' own collectives, whatever XLA
schedules.

A gradient is given to the thread as soon as it is dispatched, and its sum is waited for
K-1 steps later, so up to K-1 reductions are in flight. The state does not know: it
holds the gradients themselves, which no program overwrites. A state from elsewhere,
such as a checkpoint, has its reductions begun when it is stepped.
"""

import dataclasses
import functools
import operator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax.message import InFlight, Message, Reduced, emptied

from ._config import StepConfig
from ._own_collectives import OwnCollectiveError, check_no_own, spans_cpu_processes
from ._reduce import Reduce, make_reduce, reduction_mesh
from ._thread import CommunicationThread


class Begun(NamedTuple):
    """A reduction that has begun.

    Attributes:
      message: what it sums.
      before: the codecs' states it starts from; `None` if those are what the one before
        it leaves.
      sum: the future of the sum and of the states after it.
    """

    message: Message
    before: Any
    sum: Future[tuple[Reduced, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """Runs compute and update as programs of their own, and reduces on a thread."""

    config: StepConfig
    reason: str
    name: str = "host"
    _thread: CommunicationThread = dataclasses.field(
        default_factory=CommunicationThread
    )
    # Reductions that have begun and were not asked for yet, oldest first.
    _begun: list[Begun] = dataclasses.field(default_factory=list)
    # Programs without collectives of their own, with the form of their arguments.
    _checked: set[Any] = dataclasses.field(default_factory=set)

    def step(self, state: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Takes one step; waits for the sum that is due, and for nothing else."""
        _check_concrete(state)
        self._raise_failures()
        self._check_no_own(self._compute, state, _bare(in_flight), batch)
        fresh, left = self._compute(state, _bare(in_flight), batch)
        pending = (*in_flight.pending, fresh)
        # All but the first were begun in the steps before, if they were ours.
        first, *others = self._reductions(in_flight, pending)
        total, states = self._result(first)
        self._begun[:] = [x._replace(before=states) for x in others[:1]] + others[1:]
        due = _due(in_flight)
        self._check_no_own(self._update, state, left, total, due)
        state, filled, deviation, info = self._update(state, left, total, due)
        return state, InFlight(pending[1:], filled, states, deviation), info

    def drain(self, state: Any, in_flight: Any) -> tuple[Any, Any, Any]:
        """Waits for and applies, in order, what is in flight; the thread is idle."""
        _check_concrete(state)
        self._raise_failures()
        states, infos = in_flight.codec_states, []
        begun = self._reductions(in_flight, in_flight.pending)
        for age, reduction in enumerate(begun):
            total, states = self._result(reduction)
            self._check_no_own(self._apply[age], state, total, in_flight.filled)
            state, info = self._apply[age](state, total, in_flight.filled)
            infos.append(info)
        self._begun.clear()
        self.join()
        empty = self._emptied(_bare(in_flight))._replace(codec_states=states)
        return state, empty, tuple(infos)

    def lower(self, state: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """The program that computes; it has no collective."""
        return self._compute.lower(state, _bare(in_flight), batch)

    def join(self) -> None:
        """Waits for all reductions that have begun; what they sum stays in flight."""
        self._thread.join()

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """The mesh if it is of CPUs, else CPUs beside it."""
        return reduction_mesh(self.config.mesh, self.config.axis_name)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """None: no program overlaps anything."""
        return {}

    def _reductions(
        self, in_flight: InFlight, pending: tuple[Message, ...]
    ) -> list[Begun]:
        """Returns those of all messages, begun before or now, one after another."""
        known, found = list(self._begun), list[Begun]()
        if known and not _identical(known[0].before, in_flight.codec_states):
            known = []
        for age, message in enumerate(pending):
            if known and _identical(known[0].message, message):
                found.append(known.pop(0))
            else:
                known = []
                last = found[-1].sum if found else None
                found.append(self._begin(message, in_flight, age, last))
        return found

    def _begin(
        self, message: Message, in_flight: InFlight, age: int, last: Any
    ) -> Begun:
        """Has the thread sum, after all that it was given before; `last` is that."""
        least = self.config.width - 1 - age
        filled = in_flight.filled
        before = in_flight.codec_states if last is None else None
        # A switch set by `with` is of the caller's thread alone. Without this one, the
        # other thread would sum float64 in float32.
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]

        def reduce() -> tuple[Reduced, Any]:
            states = before if last is None else last.result()[1]
            with jax.enable_x64(x64):
                total, after = self._reduce(message, states)
            stateless = not jax.tree.leaves(states)
            # Nothing is fed back of the zeros of the start.
            real = stateless or least == 0 or _first(filled) >= least
            return total, after if real else states

        return Begun(message, before, self._thread.submit(reduce))

    def _check_no_own(self, program: Any, *args: Any) -> None:
        """Raises an `OwnCollectiveError` before such a program is dispatched.

        Compiles the program, as its first call would. A program is compiled anew, and
        checked anew, for arguments of another form.
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
        """Raises what a reduction of a step before has failed with."""
        for reduction in list(self._begun):
            if reduction.sum.done():
                self._result(reduction)

    def _result(self, reduction: Begun) -> tuple[Reduced, Any]:
        """Waits for a sum and its states; after a failure all are begun anew."""
        try:
            return reduction.sum.result()
        except Exception:
            self._begun.clear()
            raise

    @functools.cached_property
    def _reduce(self) -> Reduce:
        return make_reduce(self.config, self.reduction_mesh)

    @functools.cached_property
    def _compute(self) -> jax.stages.Wrapped:
        compute, own = self.config.work.compute, P(self.config.axis_name)
        mapped = self.config.on_mesh(compute, (P(), own, own), (own, P()))
        return jax.jit(mapped, in_shardings=(None, None, self.config.data))

    @functools.cached_property
    def _update(self) -> jax.stages.Wrapped:
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
        """For each place in the queue, the program that applies its sum in a drain."""
        return [self._applying(age) for age in range(self.config.width - 1)]

    def _applying(self, age: int) -> jax.stages.Wrapped:
        work, own = self.config.work, P(self.config.axis_name)

        def local(state: Any, total: Any, filled: Any) -> Any:
            arrived = filled[0] >= self.config.width - 1 - age
            return work.update(state, None, total._replace(arrived=arrived))

        mapped = self.config.on_mesh(local, (P(), P(), own), P())
        return jax.jit(mapped, donate_argnums=(0,) if self.config.donate else ())

    @functools.cached_property
    def _emptied(self) -> jax.stages.Wrapped:
        own = P(self.config.axis_name)
        return jax.jit(self.config.on_mesh(lambda x: emptied(x, {}), (own,), own))


def _identical(a: Any, b: Any) -> bool:
    """Whether they are the same arrays, not only equal ones."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def _bare(in_flight: InFlight) -> InFlight:
    """Without the codecs' states, which may lie elsewhere."""
    return in_flight._replace(codec_states={})


def _due(in_flight: InFlight) -> InFlight:
    """What an update reads of it: the oldest, where its deviation is asked for."""
    oldest = () if in_flight.deviation is None else in_flight.pending[:1]
    return _bare(in_flight)._replace(pending=oldest)


def _first(filled: jax.Array) -> int:
    return int(jax.device_get(filled.addressable_data(0))[0])


def _check_concrete(state: Any) -> None:
    if isinstance(state.step, jax.core.Tracer):
        raise ValueError(
            "`executor` must be 'fused' for a step inside jit or scan: the host"
            " executor runs three programs and a thread; got 'host'. Call `train.step`"
            " outside, or make the step with executor='fused'."
        )

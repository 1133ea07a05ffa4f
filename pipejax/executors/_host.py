"""A communication thread beside the compute, as in the paper.

Three programs: compute, reduce, update. The caller dispatches compute and update; a
thread of its own dispatches reduce, and no other program has a collective. For CPUs,
where a collective blocks the program it is in, and for GPUs on plain Ethernet, whose
gradients are then summed by the CPUs' own collectives, whatever XLA schedules.

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

from pipejax.buckets import Buckets
from pipejax.pipeline import PipelinedMeanState, emptied

from ._reduce import Reduce, make_reduce, reduction_mesh
from ._setting import Setting
from ._thread import CommunicationThread


class Begun(NamedTuple):
    """A reduction that has begun.

    Attributes:
      buckets: what it sums.
      before: the codecs' states it starts from; `None` if those are what the one before
        it leaves.
      sums: the future of the sums and of the states after them.
    """

    buckets: Buckets
    before: Any
    sums: Future[tuple[Buckets, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """Runs compute and update as programs of their own, and reduces on a thread."""

    setting: Setting
    reason: str
    name: str = "host"
    _thread: CommunicationThread = dataclasses.field(
        default_factory=CommunicationThread
    )
    # Reductions that have begun and were not asked for yet, oldest first.
    _begun: list[Begun] = dataclasses.field(default_factory=list)

    def step(self, carry: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One step on; waits for the sum that is due, and for nothing else."""
        halves = self.setting.halves
        _check_concrete(carry)
        self._raise_failures()
        halves.check_state(carry, share := self._share(in_flight))
        fresh, kept = self._compute(carry, _bare(in_flight), batch)
        halves.check_message(kept, share)
        pending = (*in_flight.pending, fresh)
        # All but the first were begun in the steps before, if they were ours.
        first, *others = self._reductions(carry, in_flight, pending)
        total, states = self._result(first)
        self._begun[:] = [x._replace(before=states) for x in others[:1]] + others[1:]
        due = _due(in_flight)
        carry, filled, deviation, info = self._update(carry, kept, total, due)
        after = PipelinedMeanState(pending[1:], filled, states, deviation)
        return carry, after, info

    def drain(self, carry: Any, in_flight: Any) -> tuple[Any, Any]:
        """Waits for and applies, in order, what is in flight; the thread is idle."""
        _check_concrete(carry)
        self._raise_failures()
        self.setting.halves.check_state(carry, self._share(in_flight))
        states = in_flight.codec_states
        begun = self._reductions(carry, in_flight, in_flight.pending)
        for age, reduction in enumerate(begun):
            total, states = self._result(reduction)
            carry = self._apply[age](carry, total, in_flight.filled)
        self._begun.clear()
        self.join()
        return carry, self._emptied(_bare(in_flight))._replace(codec_states=states)

    def lower(self, carry: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """The program that computes; it has no collective."""
        return self._compute.lower(carry, _bare(in_flight), batch)

    def join(self) -> None:
        """Waits for all reductions that have begun; what they sum stays in flight."""
        self._thread.join()

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """The mesh if it is of CPUs, else CPUs beside it."""
        return reduction_mesh(self.setting.mesh)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """None: no program overlaps anything."""
        return {}

    def _reductions(
        self, carry: Any, in_flight: Any, pending: tuple[Buckets, ...]
    ) -> list[Begun]:
        """Of each in the queue, begun before or now, one after another."""
        known, found = list(self._begun), list[Begun]()
        if known and not _identical(known[0].before, in_flight.codec_states):
            known = []
        for age, buckets in enumerate(pending):
            if known and _identical(known[0].buckets, buckets):
                found.append(known.pop(0))
            else:
                known = []
                last = found[-1].sums if found else None
                found.append(self._begin(carry, buckets, in_flight, age, last))
        return found

    def _begin(
        self, carry: Any, buckets: Buckets, in_flight: Any, age: int, last: Any
    ) -> Begun:
        """Has the thread sum, after all that it was given before; `last` is that."""
        form = self.setting.form(carry, self._own(buckets))
        least = self.setting.width - 1 - age
        filled = in_flight.filled
        before = in_flight.codec_states if last is None else None

        def reduce() -> tuple[Buckets, Any]:
            states = before if last is None else last.result()[1]
            totals, after = self._reduce(buckets, states, form)
            stateless = not jax.tree.leaves(states)
            # Of what is only zeros of the start nothing is fed back.
            real = stateless or least == 0 or _first(filled) >= least
            return totals, after if real else states

        return Begun(buckets, before, self._thread.submit(reduce))

    def _own(self, buckets: Any) -> Any:
        """The shapes of one device's part of them."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.size // self.setting.devices,), x.dtype),
            buckets,
        )

    def _share(self, in_flight: PipelinedMeanState) -> PipelinedMeanState:
        """The shapes of one device's part of it."""
        return in_flight._replace(pending=self._own(in_flight.pending))

    def _raise_failures(self) -> None:
        """Raises what a reduction of a step before has failed with."""
        for reduction in list(self._begun):
            if reduction.sums.done():
                self._result(reduction)

    def _result(self, reduction: Begun) -> tuple[Buckets, Any]:
        """Sums and states, when they are there; after a failure all are begun anew."""
        try:
            return reduction.sums.result()
        except Exception:
            self._begun.clear()
            raise

    @functools.cached_property
    def _reduce(self) -> Reduce:
        return make_reduce(self.setting, self.reduction_mesh)

    @functools.cached_property
    def _compute(self) -> jax.stages.Wrapped:
        compute, own = self.setting.halves.compute, P(self.setting.axis_name)
        mapped = self.setting.on_mesh(compute, (P(), own, own), (own, P()))
        return jax.jit(mapped, in_shardings=(None, None, self.setting.data))

    @functools.cached_property
    def _update(self) -> jax.stages.Wrapped:
        own, last = P(self.setting.axis_name), self.setting.width - 1

        def local(carry: Any, kept: Any, total: Any, due: Any) -> Any:
            halves, filled = self.setting.halves, due.filled
            carry, info = halves.update(carry, kept, total, filled[0] == last)
            deviation = halves.deviation(due, total, info.applied)
            return carry, jnp.minimum(filled + 1, last), deviation, info

        specs = (P(), P(), P(), own), (P(), own, own, P())
        mapped = self.setting.on_mesh(local, *specs)
        return jax.jit(mapped, donate_argnums=(0,) if self.setting.donate else ())

    @functools.cached_property
    def _apply(self) -> list[jax.stages.Wrapped]:
        """For each place in the queue, what applies its sum in a drain."""
        return [self._applying(age) for age in range(self.setting.width - 1)]

    def _applying(self, age: int) -> jax.stages.Wrapped:
        halves, own = self.setting.halves, P(self.setting.axis_name)

        def local(carry: Any, total: Any, filled: Any) -> Any:
            arrived = filled[0] >= self.setting.width - 1 - age
            return halves.update(carry, halves.idle(carry), total, arrived)[0]

        mapped = self.setting.on_mesh(local, (P(), P(), own), P())
        return jax.jit(mapped, donate_argnums=(0,) if self.setting.donate else ())

    @functools.cached_property
    def _emptied(self) -> jax.stages.Wrapped:
        own = P(self.setting.axis_name)
        return jax.jit(self.setting.on_mesh(lambda x: emptied(x, {}), (own,), own))


def _identical(a: Any, b: Any) -> bool:
    """Whether they are the same arrays, not only equal ones."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def _bare(in_flight: PipelinedMeanState) -> PipelinedMeanState:
    """Without the codecs' states, which may lie elsewhere."""
    return in_flight._replace(codec_states={})


def _due(in_flight: PipelinedMeanState) -> PipelinedMeanState:
    """What an update reads of it: the oldest, where its deviation is asked for."""
    oldest = in_flight.pending[:1] if in_flight.deviation else ()
    return _bare(in_flight)._replace(pending=oldest)


def _first(filled: jax.Array) -> int:
    return int(filled.addressable_data(0)[0])


def _check_concrete(carry: Any) -> None:
    if isinstance(carry.step, jax.core.Tracer):
        raise ValueError(
            "`executor` must be 'fused' for a step inside jit or scan: the host"
            " executor runs three programs and a thread; got 'host'. Call `train.step`"
            " outside, or make the step with executor='fused'."
        )

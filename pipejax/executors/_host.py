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
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax.buckets import Buckets
from pipejax.pipeline import PipelinedMeanState, emptied

from ._reduce import Reduce, make_reduce
from ._setting import Setting
from ._thread import CommunicationThread


@dataclasses.dataclass(frozen=True, eq=False)
class Host:
    """Runs compute and update as programs of their own, and reduces on a thread."""

    setting: Setting
    reason: str
    name: str = "host"
    _thread: CommunicationThread = dataclasses.field(
        default_factory=CommunicationThread
    )
    # Gradients whose reduction has begun and was not asked for yet, oldest first.
    _begun: list[tuple[Buckets, Future[Buckets]]] = dataclasses.field(
        default_factory=list
    )

    def step(self, carry: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One step on; waits for the sum that is due, and for nothing else."""
        halves = self.setting.halves
        _check_concrete(carry)
        self._raise_failures()
        halves.check_state(carry, share := self._share(in_flight))
        fresh, kept = self._compute(carry, batch)
        halves.check_message(kept, share)
        queue = (*in_flight.pending, fresh)
        # All but the first were begun in the steps before, if they were ours.
        futures = [self._reduction(carry, buckets) for buckets in queue]
        total = self._result(futures[0])
        self._begun[:] = list(zip(queue[1:], futures[1:], strict=True))
        carry, filled, info = self._update(carry, kept, total, in_flight.filled)
        return carry, PipelinedMeanState(queue[1:], filled), info

    def drain(self, carry: Any, in_flight: Any) -> tuple[Any, Any]:
        """Waits for and applies, in order, what is in flight; the thread is idle."""
        _check_concrete(carry)
        self._raise_failures()
        self.setting.halves.check_state(carry, self._share(in_flight))
        futures = [self._reduction(carry, buckets) for buckets in in_flight.pending]
        for age, future in enumerate(futures):
            total = self._result(future)
            carry = self._apply[age](carry, total, in_flight.filled)
        self._begun.clear()
        self.join()
        return carry, self._emptied(in_flight)

    def lower(self, carry: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """The program that computes; it has no collective."""
        del in_flight
        return self._compute.lower(carry, batch)

    def join(self) -> None:
        """Waits for all reductions that have begun; what they sum stays in flight."""
        self._thread.join()

    @property
    def compiler_options(self) -> dict[str, Any]:
        """None: no program overlaps anything."""
        return {}

    def _reduction(self, carry: Any, buckets: Buckets) -> Future[Buckets]:
        """The future of their sum: the one begun before, or one begun now."""
        for known, future in self._begun:
            if all(known[name] is x for name, x in buckets.items()):
                return future
        sizes = self.setting.halves.gradient_sizes(carry)
        return self._thread.submit(self._reduce, buckets, sizes)

    def _share(self, in_flight: PipelinedMeanState) -> PipelinedMeanState:
        """The shapes of one device's part of it."""
        devices = self.setting.mesh.shape[self.setting.axis_name]
        return in_flight._replace(
            pending=jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((x.size // devices,), x.dtype),
                in_flight.pending,
            )
        )

    def _raise_failures(self) -> None:
        """Raises what a reduction of a step before has failed with."""
        for _, future in list(self._begun):
            if future.done():
                self._result(future)

    def _result(self, future: Future[Buckets]) -> Buckets:
        """The sum, when it is there; after a failure all are begun anew."""
        try:
            return future.result()
        except Exception:
            self._begun.clear()
            raise

    @functools.cached_property
    def _reduce(self) -> Reduce:
        return make_reduce(self.setting)

    @functools.cached_property
    def _compute(self) -> jax.stages.Wrapped:
        compute, axis = self.setting.halves.compute, self.setting.axis_name
        mapped = self.setting.on_mesh(compute, (P(), P(axis)), (P(axis), P()))
        return jax.jit(mapped, in_shardings=(None, self.setting.data))

    @functools.cached_property
    def _update(self) -> jax.stages.Wrapped:
        own, last = P(self.setting.axis_name), self.setting.width - 1

        def local(carry: Any, kept: Any, total: Any, filled: Any) -> Any:
            arrived = filled[0] == last
            carry, info = self.setting.halves.update(carry, kept, total, arrived)
            return carry, jnp.minimum(filled + 1, last), info

        mapped = self.setting.on_mesh(local, (P(), P(), P(), own), (P(), own, P()))
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

    def _emptied(self, in_flight: Any) -> Any:
        places = jax.tree.map(lambda x: x.sharding, in_flight)
        return jax.jit(emptied, out_shardings=places)(in_flight)


def _check_concrete(carry: Any) -> None:
    if isinstance(carry.step, jax.core.Tracer):
        raise ValueError(
            "`executor` must be 'fused' for a step inside jit or scan: the host"
            " executor runs three programs and a thread; got 'host'. Call `train.step`"
            " outside, or make the step with executor='fused'."
        )

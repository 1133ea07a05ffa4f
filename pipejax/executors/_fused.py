"""One XLA program a step: the collectives overlap inside it.

For GPUs and TPUs, whose compilers can start a collective and go on. What makes them do
so: stages woven into the compute, a late consumer, and compiler options.

A step takes the oldest message off the queue and puts a fresh one at its end. The
queue is put together outside the program, which so copies no message that stays in it,
and which may overwrite all that it is given when asked to donate.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax.message import (
    InFlight,
    Message,
    Reduced,
    arrivals,
    emptied,
    has_arrived,
    reduced,
    reduction,
    shift,
)

from ._config import StepConfig
from ._options import Options, options_for
from ._weave import weave


@dataclasses.dataclass(frozen=True, eq=False)
class Fused:
    """Runs compute, all-reduce and update as one program."""

    config: StepConfig
    reason: str
    name: str = "fused"

    def step(self, state: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One step on, dispatched; on several CPU devices after the one before."""
        self._wait_for(state)
        traced = isinstance(state.step, jax.core.Tracer)
        leaving, staying = _parted(in_flight)
        program = self._programs[traced]
        state, entering, info = program(state, leaving, staying, batch)
        pending = (*staying, *entering.pending)
        return state, entering._replace(pending=pending), info

    def drain(self, state: Any, in_flight: Any) -> tuple[Any, Any, Any]:
        """Reduces and applies, in order, what is in flight; an info for each."""
        self._wait_for(state)
        return self._drain(state, in_flight)

    def lower(self, state: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """The step's program."""
        return self._programs[False].lower(state, *_parted(in_flight), batch)

    def join(self) -> None:
        """Nothing to wait for: the devices run its programs in order."""

    @property
    def reduction_mesh(self) -> Mesh:
        """The mesh."""
        return self.config.mesh

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Those for the mesh's devices that its compiler takes."""
        return self.options.kept

    @functools.cached_property
    def options(self) -> Options:
        """The options, and those the compiler refused."""
        return options_for(self.config.mesh)

    @functools.cached_property
    def _programs(self) -> dict[bool, jax.stages.Wrapped]:
        """The step as a program of its own, and as part of one being traced."""
        own = P(self.config.axis_name)
        mapped = self.config.on_mesh(
            self._local_step, (P(), own, own, own), (P(), own, P())
        )
        program = functools.partial(
            jax.jit,
            mapped,
            in_shardings=(None, None, None, self.config.data),
            donate_argnums=self._donated,
        )
        # JAX takes compiler options for a whole program only.
        return {
            False: program(compiler_options=self.compiler_options),
            True: program(),
        }

    @functools.cached_property
    def _drain(self) -> jax.stages.Wrapped:
        own = P(self.config.axis_name)
        specs = (P(), own), (P(), own, P())
        mapped = self.config.on_mesh(self._local_drain, *specs)
        return jax.jit(mapped, donate_argnums=self._donated)

    @property
    def _donated(self) -> tuple[int, ...]:
        """The arguments of a program that it may overwrite: the state and the queue."""
        return (0, 1) if self.config.donate else ()

    def _local_step(self, state: Any, leaving: Any, staying: Any, batch: Any) -> Any:
        """One device's part of a step: the recursion, read from top to bottom."""
        config, work = self.config, self.config.work
        in_flight = leaving._replace(pending=(*leaving.pending, *staying))
        before, arrived = in_flight.codec_states, has_arrived(in_flight)
        if config.width == 1:
            fresh, left = work.compute(state, in_flight, batch)
            total, after = reduced(
                fresh, before, arrived, config.sums_by, config.axis_name
            )
        else:
            oldest = in_flight.pending[0]
            stages = reduction(oldest, config.sums_by, config.axis_name)
            whole, after, (fresh, left) = weave(
                oldest, before, stages, work.compute, state, in_flight, batch
            )
            total = Reduced.of(whole, arrived)
            after = total.settled(after, before)
        state, info = work.update(state, left, total)
        deviation = work.deviation(in_flight, total)
        queue = shift(in_flight, fresh, after, deviation)
        return state, queue._replace(pending=queue.pending[-1:]), info

    def _local_drain(self, state: Any, in_flight: Any) -> Any:
        """One device's part of a drain: oldest first, as they would have arrived."""
        config, states, infos = self.config, in_flight.codec_states, []
        queue = zip(in_flight.pending, arrivals(in_flight), strict=True)
        for message, arrived in queue:
            total, states = reduced(
                message, states, arrived, config.sums_by, config.axis_name
            )
            state, info = config.work.update(state, None, total)
            infos.append(info)
        return state, emptied(in_flight, states), tuple(infos)

    def _wait_for(self, state: Any) -> None:
        if self._shares_threads and not isinstance(state.step, jax.core.Tracer):
            jax.block_until_ready(state.step)

    @functools.cached_property
    def _shares_threads(self) -> bool:
        """Several CPU devices of one process share one pool of threads.

        An all-reduce holds one for each device until all have come. Of two steps at
        once each may hold what the other waits for, and neither ends.
        """
        devices = self.config.mesh.local_devices
        return len(devices) > 1 and devices[0].platform == "cpu"


def _parted(in_flight: InFlight) -> tuple[InFlight, tuple[Message, ...]]:
    """Returns the queue with the oldest message alone, and the others."""
    oldest, staying = in_flight.pending[:1], in_flight.pending[1:]
    return in_flight._replace(pending=oldest), staying

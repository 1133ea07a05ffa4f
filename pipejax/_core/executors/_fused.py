"""Runs each step as one XLA program, in which the collectives overlap with compute.

This executor is made for GPUs and TPUs, whose compilers can start a collective and go
on with other work. Three things make them do so:

- The stages of the all-reduce are woven into the compute.
- The update, which consumes the sum, is kept behind the compute by a barrier.
- The program is compiled with options that allow the overlap.

A step takes the oldest message off the queue and puts a fresh one at its end. The queue
is put together outside the program, so the program copies no message that stays in the
queue. With `donate`, the program of a step may overwrite the state and the queue,
except for the messages that stay. The program of a drain may overwrite all of both.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import (
    InFlight,
    Message,
    advanced,
    arrivals,
    emptied,
    has_arrived,
    shift,
)

from ._config import StepConfig
from ._options import Options, options_for
from ._own_collectives import spans_cpu_processes
from ._thread import join, submit
from ._weave import weave


@dataclasses.dataclass(frozen=True, eq=False)
class Fused:
    """Executor that runs compute, all-reduce and update as one program.

    Attributes:
      config: The step to run.
      reason: Why the executor was chosen.
      name: The name of the executor, `"fused"`.
    """

    config: StepConfig
    reason: str
    name: str = "fused"

    def step(self, state: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Takes one step: dispatches its program, and does not wait for it.

        If the mesh has several CPU devices in this process, the call first waits for
        the step before.
        """
        self._wait_for(state)
        traced = isinstance(state.step, jax.core.Tracer)
        leaving, staying = _parted(in_flight)
        program = self._programs[traced]
        given = state, leaving, staying, batch
        state, entering, info = self._launched(program, *given)
        pending = (*staying, *entering.pending)
        return state, entering._replace(pending=pending), info

    def drain(self, state: Any, in_flight: Any) -> tuple[Any, Any, Any]:
        """Reduces and applies everything in flight, in order, in one program.

        The program returns an info for each place in the queue.
        """
        self._wait_for(state)
        return self._launched(self._drain, state, in_flight)

    def lower(self, state: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the lowered program of a step."""
        return self._programs[False].lower(state, *_parted(in_flight), batch)

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
        return options_for(self.config.mesh, self.config.width)

    @functools.cached_property
    def _programs(self) -> dict[bool, jax.stages.Wrapped]:
        """Returns two programs of a step: to run, and to be part of a traced program.

        The key says whether the step is being traced.
        """
        own = P(self.config.axis_name)
        program = functools.partial(
            jax.jit,
            self.config.on_state(self._local_step, (own, own, own), (own, P())),
            in_shardings=(None, None, None, self.config.batches),
            donate_argnums=self._donated,
        )
        # JAX accepts compiler options only for a whole program.
        return {
            False: program(compiler_options=self.compiler_options),
            True: program(),
        }

    @functools.cached_property
    def _drain(self) -> jax.stages.Wrapped:
        """Returns the program of a drain."""
        own = P(self.config.axis_name)
        program = self.config.on_state(self._local_drain, (own,), (own, P()))
        return jax.jit(program, donate_argnums=self._donated)

    @property
    def _donated(self) -> tuple[int, ...]:
        """Returns the numbers of the arguments that a program may overwrite.

        These are the state, and the queue or what leaves it.
        """
        return (0, 1) if self.config.donate else ()

    def _local_step(self, state: Any, leaving: Any, staying: Any, batch: Any) -> Any:
        """Runs one device's part of a step.

        The body is the recursion of the pipeline, from top to bottom.
        """
        config, work = self.config, self.config.work
        in_flight = leaving._replace(pending=(*leaving.pending, *staying))
        before, arrived = in_flight.codec_states, has_arrived(in_flight)
        behind, sums_by = arrivals(advanced(in_flight)), config.sums_by
        if config.width == 1:
            fresh, left = work.compute(state, in_flight, batch)
            exchange = work.exchange(state, fresh, arrived, behind, sums_by)
            reduced, after = exchange.run(before)
        else:
            oldest = in_flight.pending[0]
            exchange = work.exchange(state, oldest, arrived, behind, sums_by)
            value, after, (fresh, left) = weave(
                exchange.start,
                before,
                exchange.stages,
                work.compute,
                *(state, in_flight, batch),
                early=exchange.early,
            )
            reduced = exchange.end(value)
            after = reduced.settled(after, before)
        state, info = work.update(state, left, reduced)
        deviation = work.deviation(in_flight, reduced)
        queue = shift(in_flight, fresh, after, deviation)
        return state, queue._replace(pending=queue.pending[-1:]), info

    def _local_drain(self, state: Any, in_flight: Any) -> Any:
        """Runs one device's part of a drain.

        It applies the oldest message first, in the same order as steps would.
        """
        work, states, infos = self.config.work, in_flight.codec_states, []
        real = arrivals(in_flight)
        for age, message in enumerate(in_flight.pending):
            behind, sums_by = real[age + 1 :], self.config.sums_by
            exchange = work.exchange(state, message, real[age], behind, sums_by)
            reduced, states = exchange.run(states)
            state, info = work.update(state, None, reduced)
            infos.append(info)
        return state, emptied(in_flight, states), tuple(infos)

    def _launched(self, program: jax.stages.Wrapped, state: Any, *rest: Any) -> Any:
        """Dispatches a program, on CPUs of several processes in the common order.

        Its collectives come after those that were submitted to the communication thread
        before, and those that are submitted later wait until it has ended. The program
        stays on the caller's thread, whose settings of JAX it is compiled with.
        """
        traced = isinstance(state.step, jax.core.Tracer)
        if traced or not spans_cpu_processes(self.config.mesh):
            return program(state, *rest)
        join()
        *results, info = program(state, *rest)
        submit(jax.block_until_ready, info)  # which no program overwrites
        return *results, info

    def _wait_for(self, state: Any) -> None:
        """Waits for the step that made `state`, if two steps must not run at once."""
        if self._shares_threads and not isinstance(state.step, jax.core.Tracer):
            jax.block_until_ready(state.step)

    @functools.cached_property
    def _shares_threads(self) -> bool:
        """Returns whether the mesh has several CPU devices in this process.

        They share one pool of threads. An all-reduce holds one thread for each device
        until all devices have joined it. If two steps ran at once, each could hold
        threads that the other waits for, and neither would end.
        """
        devices = self.config.mesh.local_devices
        return len(devices) > 1 and devices[0].platform == "cpu"


def _parted(in_flight: InFlight) -> tuple[InFlight, tuple[Message, ...]]:
    """Returns the queue with the oldest message alone, and the other messages."""
    oldest, staying = in_flight.pending[:1], in_flight.pending[1:]
    return in_flight._replace(pending=oldest), staying

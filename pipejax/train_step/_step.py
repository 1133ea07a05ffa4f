"""A train step of width K on a mesh.

One step, in full:

1. every device computes its message: gradient, loss, metrics, change of model state
2. the pipeline trades it for the sum of the messages of K-1 steps ago
3. the update applies that, unless it has not arrived or is not finite

1 and 3 are a `LocalStep`; the executor runs them and the exchange in between. Warm-up
is the same step at width 1, past an empty pipeline. A drain is 3 alone, for each
message in flight.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import numpy as np
import optax

from pipejax.collectives import Schedule, Transfer
from pipejax.executors import Executor, StepConfig, choose
from pipejax.mesh import AxisName, laid_out
from pipejax.message import Message, at_width_1

from ._check_input import check_batch
from ._check_state import check_in_flight, check_pending, check_state
from ._feed import check_global, global_batch, least_of_all_processes
from ._finite import check_model_state, non_finite
from ._gradient import empty_message
from ._info import StepInfo
from ._init import initial
from ._local_step import LocalStep
from ._state import PipelineState, ReplicatedState
from ._transfers import transfers_of


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """A train step and its settings, as `make_train_step` returns it.

    Pure: everything that changes is in the `PipelineState` that goes in and comes out.
    """

    config: StepConfig
    schedule: Schedule
    warmup_steps: int
    executor_name: str

    def init(
        self,
        params: optax.Params,
        *,
        model_state: Any = None,
        rng: jax.Array | None = None,
        opt_state: optax.OptState | None = None,
        batch: Any = None,
    ) -> PipelineState:
        """Lays out the state before the first step on the mesh.

        Args:
          params: pytree of floating arrays.
          model_state: handed to `loss_fn` as a keyword, and updated by what it returns.
            Floating leaves are averaged over devices; others must not depend on data.
          rng: key; `loss_fn` gets one of its own per device and step as a keyword.
          opt_state: to go on from an optimizer's state; `None` makes a new one.
          batch: one batch, arrays or `jax.ShapeDtypeStruct`s. Needed only when
            `loss_fn` returns metrics or a weight and `width > 1`, to know what travels
            with the gradients.

        Returns:
          A `PipelineState`; copies, `params` themselves are never donated.

        Raises:
          ValueError: for parameters that are not floating or are sharded, keywords that
            `loss_fn` does not take, optimizers that cannot be delayed, a bad batch.
        """
        self.join()  # only one thread may launch collectives
        given = params, model_state, rng, opt_state, batch
        state, in_flight = initial(
            self.local_step, self.config, *given, feeds_back=self.feeds_back
        )
        in_flight = in_flight._replace(codec_states=self.codec_states(state.params))
        counted = self.counted or any(non_finite(state.model_state))
        return state.with_in_flight(in_flight, np.int32(0) if counted else None)

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, StepInfo]:
        """One iteration: computes this batch's gradient, applies an earlier one.

        Args:
          state: from `init` or the step before.
          batch: pytree of arrays whose leading axis is the global batch, a multiple of
            devices times microbatches. Device i takes the i-th contiguous share. On
            several processes `train.batch` makes it.

        Returns:
          The next state, and a `StepInfo` on the iteration whose gradient arrived.

        Raises:
          ValueError: for a batch that does not divide, a state of another width or
            mesh, or a loss function that breaks its contract.
        """
        self._check(state)
        check_global(batch, self.mesh)
        check_batch(batch, self.config.devices, self.local_step.microbatches)
        check_model_state(self, state, batch)
        own, in_flight = ReplicatedState.of(state), state.in_flight
        batch = jax.tree.map(lambda leaf: laid_out(leaf, self.config.data), batch)
        now = self._phase(state.calls)
        calls = self._counted_on(state.calls)
        if self.width > 1 and self.warmup_steps and calls <= self.warmup_steps:
            # The pipeline stays empty while the synchronous twin goes past it.
            past, plain = at_width_1(in_flight), now.plain.executor
            own, past, info = plain.step(own, past, batch)
            # Nothing is in flight before and after; the counter may have been donated.
            in_flight = in_flight._replace(
                filled=past.filled, codec_states=past.codec_states
            )
        else:
            own, in_flight, info = now.executor.step(own, in_flight, batch)
        return own.with_in_flight(in_flight, calls), info

    def batch(self, local: Any) -> Any:
        """Makes the global batch of which this process has the part `local`.

        With P processes that have n examples each, the global batch has P n examples,
        in the order of the processes' devices on the mesh. Every process must call this
        with the same n. On one process, `local` is the whole batch.

        Args:
          local: pytree of arrays, such as NumPy arrays, whose leading axis is this
            process's part of the batch.

        Returns:
          The same pytree of global `jax.Array`s, one share on each device.

        Raises:
          ValueError: if the part does not divide among the devices of this process.

        >>> import numpy as np, optax, pipejax as pj
        >>> loss_fn = lambda w, batch: ((w - batch) ** 2).mean()
        >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
        >>> train.batch(np.zeros(4)).sharding.spec == jax.sharding.PartitionSpec("data")
        True
        """
        return global_batch(local, self.config.data, self.config.devices)

    def fewest_batches(self, own: int) -> int:
        """Returns the least number of batches that any process has.

        A step waits for every process, so a process that has one batch more than the
        others waits for ever. Every process must call this before an epoch, and take as
        many batches as it returns: `itertools.islice(loader, fewest)`.

        Args:
          own: how many batches this process has.

        Returns:
          The least `own` of all processes, the same on each of them.

        Raises:
          ValueError: if `own` is not a nonnegative integer.
        """
        self.join()  # only one thread may launch collectives
        return least_of_all_processes(own)

    def join(self) -> None:
        """Waits until no reduction is under way; gradients in flight stay in flight.

        Needed before any other collective on CPUs of several processes, such as those
        of a checkpoint or of an evaluation.
        """
        for phase in self.phases:
            phase.executor.join()

    def drain(self, state: PipelineState) -> tuple[PipelineState, tuple[StepInfo, ...]]:
        """Reduces and applies, in order, every gradient in flight.

        A run of n steps and a drain has applied all n gradients, and their infos
        together hold all n losses. Stepping on is allowed: the pipeline then fills
        anew, its first `width - 1` steps applying nothing.

        Args:
          state: from `init`, `step` or `drain`.

        Returns:
          The state with nothing in flight, and `width - 1` infos, oldest first; where
          the pipeline was not full, nothing has arrived for the first of them.

        Raises:
          ValueError: for a state of another width or mesh.
        """
        self._check(state)
        check_pending(
            state, state.in_flight, self.local_step.reduce_dtype, self.config.devices
        )
        executor = self._phase(state.calls).executor
        own, in_flight, infos = executor.drain(
            ReplicatedState.of(state), state.in_flight
        )
        return own.with_in_flight(in_flight, state.calls), infos

    def lower(self, state: PipelineState, batch: Any) -> jax.stages.Lowered:
        """The program a step computes in, lowered: to be read, counted or compiled.

        Args:
          state: a state, or `jax.eval_shape(train.init, params)`.
          batch: arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          The `jax.stages.Lowered` of what `step` runs past warm-up and schedule. With
          the host executor it is the compute alone, without the all-reduce.

        Raises:
          ValueError: as `step`.
        """
        self._check(state)
        check_batch(batch, self.config.devices, self.local_step.microbatches)
        own = ReplicatedState.of(state)
        return self.executor.lower(own, state.in_flight, batch)

    def transfers(self, state: PipelineState, batch: Any) -> tuple[Transfer, ...]:
        """Lists what one step sends, collective by collective, without running it.

        Args:
          state: a state, or its shapes.
          batch: arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          Kind, devices and bytes of each, past the last boundary of a schedule: first
          the collectives that `loss_fn` and `tx` have of their own, for which they are
          compiled, then those of the exchange.
        """
        own = ReplicatedState.of(state)
        return transfers_of(self.config, own, state.in_flight, batch)

    def codec_states(self, params: optax.Params) -> Any:
        """Returns what codecs keep before the first step, of all phases side by side.

        Args:
          params: the parameters, or their shapes.
        """
        like = self.gradients_form(params)
        states: dict[str, Any] = {}
        for phase in self.phases:
            config = phase.config.at(phase.executor.reduction_mesh)
            states |= config.codec_states(like)
        return states

    def gradients_form(self, params: optax.Params) -> Message:
        """Returns the shapes of a message that has gradients alone."""
        return jax.eval_shape(
            lambda: empty_message(params, None, self.local_step.reduce_dtype)
        )._replace(passengers=None)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What the step is compiled with: those its compiler does not refuse."""
        return self.executor.compiler_options

    @functools.cached_property
    def plain(self) -> "TrainStep":
        """The synchronous twin: the same step at width 1."""
        config = dataclasses.replace(self.config, width=1)
        return dataclasses.replace(self, config=config, warmup_steps=0)

    @functools.cached_property
    def phases(self) -> tuple["TrainStep", ...]:
        """For each all-reduce of the schedule the step with it; the last is this."""
        *earlier, _ = self.schedule.phases
        configs = (dataclasses.replace(self.config, all_reduce=x) for x in earlier)
        return (*(dataclasses.replace(self, config=x) for x in configs), self)

    @functools.cached_property
    def executor(self) -> Executor:
        """What runs the step in the end; its `name`, and the `reason` it was chosen."""
        return choose(self.executor_name, self.config)

    @property
    def local_step(self) -> LocalStep:
        """What each device does."""
        return cast(LocalStep, self.config.work)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices."""
        return self.config.mesh

    @property
    def width(self) -> int:
        """The width K of the pipeline."""
        return self.config.width

    @property
    def axis_name(self) -> AxisName:
        """The mesh axis of the data, or both."""
        return self.config.axis_name

    @property
    def counted(self) -> bool:
        """Whether the number of calls decides which program a step runs."""
        return self.warmup_steps > 0 or bool(self.schedule.boundaries)

    @property
    def feeds_back(self) -> bool:
        """Whether the pipeline keeps deviations; one of width 1 has none."""
        return self.width > 1 and self.local_step.deviation_feedback > 0

    def _check(self, state: PipelineState) -> None:
        check_state(state, self.config.data.device_set, counted=self.counted)
        devices, fed = self.config.devices, self.feeds_back
        check_in_flight(state.in_flight, self.width, devices, feeds_back=fed)

    def _counted_on(self, calls: Any) -> Any:
        """Returns the number of calls after a step, where it is still needed."""
        if calls is None or isinstance(calls, jax.core.Tracer) or self.counted:
            return calls if calls is None else calls + np.int32(1)
        return None

    def _phase(self, calls: Any) -> "TrainStep":
        """Returns the step of the phase that so many calls have led to."""
        if not self.schedule.boundaries:
            return self
        number = self.schedule.phase(int(calls))
        if int(calls) in self.schedule.boundaries:
            # Only one thread may launch collectives; what it sums is begun anew.
            self.phases[number - 1].executor.join()
        return self.phases[number]

"""Runs a train step of width K on a mesh.

One step has three parts:

1. Every device computes its message: gradients, changes of model state, and passengers.
2. The message enters the pipeline. The messages of K-1 steps ago leave the pipeline and
   are summed over devices.
3. The update applies the sum, unless it has not arrived or is not finite.

A `Step` has a function for each part, which an executor runs. A warm-up runs the same
step at width 1 and leaves the pipeline empty. A drain sums and applies every message in
flight, and computes none.
"""

import bisect
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import (
    Executor,
    Fused,
    Host,
    OwnCollectiveError,
    StepConfig,
    check_codec_states,
    choose,
    codec_states,
    join,
    ready_after,
)
from pipejax._core.message import at_width_1
from pipejax._core.step import (
    PipelineState,
    Settings,
    StepInfo,
    check_empty,
    check_in_flight,
    check_kind,
    check_optimizer_of,
    check_pending,
    check_state,
    common_of,
)
from pipejax._internal.mesh import AxisName, inner_axes, without_mesh
from pipejax._internal.structures import form_of, identical
from pipejax._internal.types import Tree
from pipejax.collectives import Transfer

from ._edited import KnownPairs
from ._feed import (
    data_sharding,
    global_batch,
    least_of_all_processes,
)
from ._finite import check_model_state
from ._init import Arguments, initial, planned
from ._inputs import example_inputs, inputs_on_mesh, step_inputs
from ._lead import Lead
from ._once import Checked
from ._ranks import log_ranks
from ._transfers import transfers_of


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """A train step and its settings, which `make_train_step` returns.

    The methods are pure: everything that changes is in the `PipelineState` that they
    take and return.

    A run may begin with other steps: synchronous ones in a warm-up, or ones with
    another all-reduce. A state counts its calls if there are such phases.

    References:
      Li et al., Pipe-SGD, NeurIPS 2018, https://arxiv.org/abs/1811.03619
    """

    # What each device does, the mesh, the width, and the last all-reduce of a run.
    config: StepConfig
    # The argument `executor` of `make_train_step`.
    executor_name: str
    # The configuration of each phase before the last. A phase of width 1 leaves the
    # pipeline empty.
    earlier: tuple[StepConfig, ...] = ()
    # For each of them the number of calls with which the next one begins.
    boundaries: tuple[int, ...] = ()
    _checked: Checked = dataclasses.field(default_factory=Checked)
    _lead: Lead = dataclasses.field(default_factory=Lead)
    known_pairs: KnownPairs = dataclasses.field(default_factory=KnownPairs)

    @without_mesh()
    def init(
        self,
        params: optax.Params,
        *,
        model_state: Any = None,
        rng: Any = None,
        opt_state: optax.OptState | None = None,
        batch: Any = None,
        shared: Any = None,
    ) -> PipelineState:
        """Makes the state before the first step and lays it out on the mesh.

        Args:
          params: Pytree of floating arrays. On a mesh with inner axes, each keeps the
            `NamedSharding` that it comes with. All groups must have the same arrays.
          model_state: Passed to `loss_fn` as a keyword, and updated by what `loss_fn`
            returns. Changes of floating and complex leaves are averaged over devices.
            Others must be the same on every device, whatever its share of the data.
          rng: PRNG key, or a pytree of keys, such as a dict. In every step, `loss_fn`
            gets the same pytree of new keys as a keyword, other ones on each device.
          opt_state: State of the optimizer to continue from. `None` makes a new one.
          batch: One batch, as arrays or `jax.ShapeDtypeStruct`s. It shows what travels
            with the gradients if `width` is above 1. It is needed if `loss_fn` returns
            metrics or a weight, if it returns floating or complex leaves of the model
            state unchanged, or if the model state is not finite.
          shared: As for `step`, as arrays or shapes, if `loss_fn` takes it and `batch`
            is given.

        Returns:
          A `PipelineState`. It holds copies, so that `params` are never donated.

        Raises:
          ValueError: If parameters are not floating or are sharded over the data, if
            `loss_fn` does not take a keyword that is given or requires one that is not,
            if the optimizer cannot be used, if `opt_state` does not fit, if the batch
            does not divide, if model state that `loss_fn` changes is not finite, or if
            processes or groups have different arrays. While traced, also on a mesh with
            inner axes.
        """
        self.join()  # Only one thread may launch collectives.
        arguments = Arguments(params, model_state, rng, opt_state)
        inputs = example_inputs(self.config, batch, shared)
        plan = planned(self.config, arguments, inputs)
        log_ranks(self.phases, plan.message)
        settings = {
            "warmup_steps": self.boundaries,  # and those of a schedule
            "executor": self.executor.name,
        }
        state = initial(self.phases, arguments, plan, settings)
        check_model_state(self.config, state, inputs)
        return self.known_pairs.remember(self._begun(state))

    @without_mesh()
    def abstract_state(
        self,
        params: optax.Params,
        *,
        model_state: Any = None,
        rng: Any = None,
        opt_state: optax.OptState | None = None,
        batch: Any = None,
        shared: Any = None,
    ) -> PipelineState:
        """Returns the shapes, dtypes and shardings of the state that `init` makes.

        Nothing is computed or placed, so the devices of the mesh need not be attached.
        The result is what `lower`, `jax.jit(..., out_shardings=...)` and
        `pipejax.checkpoint.restore` take in place of a state.

        Args:
          params: Parameters, as arrays or shapes (`jax.ShapeDtypeStruct`). Those that
            have a sharding keep it.
          model_state: As for `init`, or shapes.
          rng: As for `init`, or shapes.
          opt_state: As for `init`, or shapes.
          batch: As for `init`.
          shared: As for `init`.

        Returns:
          A `PipelineState` in which shapes stand for arrays.

        Raises:
          ValueError: As in `init`, for what does not depend on values.

        Examples:
          >>> import jax, optax, pipejax as pj
          >>> loss_fn = lambda w, batch: ((w - batch) ** 2).mean()
          >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
          >>> state = train.abstract_state(jax.ShapeDtypeStruct((3,), "float32"))
          >>> state.params.shape, state.in_flight.pending[0].gradients.dtype
          ((3,), dtype('float32'))
        """
        arguments = Arguments(params, model_state, rng, opt_state)
        inputs = example_inputs(self.config, batch, shared)
        return self._begun(
            planned(self.config, arguments, inputs).shapes, abstract=True
        )

    @without_mesh()
    def step(
        self, state: PipelineState, batch: Tree, shared: Tree = None
    ) -> tuple[PipelineState, StepInfo]:
        """Computes the gradient of this batch, and applies that of K-1 steps ago.

        The call returns before the device has run the step, but waits if it is more
        than about a second of steps behind.

        Args:
          state: State that `init`, `step` or `drain` returned.
          batch: Pytree of arrays whose leading axis is the global batch. Its length is
            a multiple of the number of devices times `microbatches`. Device i takes the
            i-th contiguous share. On several processes, make the global batch with
            `train.batch`.
          shared: Pytree of arrays and numbers that `loss_fn` gets as the keyword
            `shared`, the same on every device: parameters of another model, a
            temperature, a step number. It is neither differentiated nor sent, and this
            step computes with it, whatever the width. Arrays keep their sharding inside
            groups, and are never donated. Python numbers are weakly typed, so that
            other numbers compile nothing anew. In the first step of a run, processes
            compare what they are given.

        Returns:
          The next state, and a `StepInfo` about the step whose gradient has arrived.

        Raises:
          ValueError: If the batch does not divide, or differs between processes of a
            group that does not split it, if processes take other steps or batches of
            other shapes, if an array of `shared` is split over the data or differs
            between processes, if the state has another width or mesh, if
            `params` of a sharded optimizer were replaced by hand, or if the loss
            function breaks its contract.
        """
        self._check(state)
        inputs = step_inputs(self.config, self._checked, state, batch, shared)
        phase = self.phase_after(state.calls)
        if state.calls is not None:
            state = state._replace(calls=state.calls + np.int32(1))
        queue, alone = state.in_flight, self.phases[phase].width != self.width
        if alone:
            # A warm-up keeps the arrays of the queue that it begins with.
            if not identical(self._checked.empty, queue.pending):
                check_empty(queue)
            state = state._replace(in_flight=at_width_1(queue))
        self._checked.empty = queue.pending if alone else ()
        self._lead.wait()
        try:
            results = self._executor_of(phase).step(state, inputs)
        except OwnCollectiveError as error:
            results = self._one_program(phase, error).step(state, inputs)
        state, info, alike = results
        self._lead.add(info.loss, alike)
        if alike is not None and self._checked.is_new(inputs.batch):
            self._lead.check_all()  # beside a step that was compiled, a wait is short
        if alone:
            # A synchronous step leaves the pipeline empty. Its own queue has no place,
            # but it moves the codec states, and may overwrite the counter.
            past = state.in_flight
            queue = queue._replace(filled=past.filled, codec_states=past.codec_states)
            state = state._replace(in_flight=queue)
        return self.known_pairs.remember(state), info

    @without_mesh()
    def batch(self, local: Any, *, axis_name: AxisName | None = None) -> Any:
        """Makes the global batch of which this process has the part `local`.

        If P processes have n examples each, the global batch has P n examples, in the
        order of the processes' devices on the mesh. Every process must call this method
        with the same n. If there is one process, `local` is the whole batch. Processes
        whose devices have the same rows, as in a group that does not split them, must
        give the same part, and count once. The first step compares shapes and parts.

        Args:
          local: Pytree of arrays, such as NumPy arrays, whose leading axis is this
            process's part of the batch. They are copied.
          axis_name: Mesh axes over which the batch is split: those of the train step,
            followed by inner axes over which each group splits its share, as in
            `("host", "fsdp")`. `None` stands for the axes of the train step alone.

        Returns:
          The same pytree of global `jax.Array`s, with one share on each device.

        Raises:
          ValueError: If the part does not divide among the devices of this process, or
            if `axis_name` does not begin with the axes of the train step.

        Examples:
          >>> import numpy as np, optax, pipejax as pj
          >>> loss_fn = lambda w, batch: ((w - batch) ** 2).mean()
          >>> mesh = pj.data_mesh(1)
          >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh)
          >>> spec = train.batch(np.zeros(4)).sharding.spec
          >>> spec == jax.sharding.PartitionSpec("data")
          True
        """
        return global_batch(local, data_sharding(self.config, axis_name))

    @without_mesh()
    def fewest_batches(self, own: int) -> int:
        """Returns the least number of batches that any process has.

        A step waits for every process, so a process that has one batch more than the
        others waits for ever. Every process must call this method before an epoch, and
        take as many batches as the method returns: `itertools.islice(loader, fewest)`.

        Args:
          own: Number of batches that this process has.

        Returns:
          The least `own` of all processes, the same number on each of them.

        Raises:
          ValueError: If `own` is not a nonnegative integer.
        """
        self.join()  # Only one thread may launch collectives.
        return least_of_all_processes(own)

    def join(self) -> None:
        """Waits until no reduction is under way; gradients in flight stay in flight.

        The method waits for the reductions of all train steps of this process. On CPUs
        of several processes, call it before any collective that this library does not
        launch, such as those of an evaluation.
        """
        join()

    @without_mesh()
    def drain(self, state: PipelineState) -> tuple[PipelineState, tuple[StepInfo, ...]]:
        """Reduces and applies, in order, every gradient in flight.

        After a run of n steps and a drain, all n gradients have been applied, except
        for those that were skipped. The infos of the steps and of the drain together
        hold all n losses. The run may continue after a drain. The pipeline then fills
        again, and the first `width - 1` steps apply nothing.

        Args:
          state: State that `init`, `step` or `drain` returned.

        Returns:
          The state with nothing in flight, and `width - 1` infos, oldest first. If the
          pipeline was not full, nothing has arrived for the first of the infos.

        Raises:
          ValueError: If the state has another width or mesh, or if processes have taken
            other steps or batches of other shapes.
        """
        self._check(state)
        args = state.trainable.whole_params, state.model_state, state.shards
        wanted, _ = self.config.empty_messages(*args)
        check_pending(wanted, state.in_flight, self.config.messages)
        phase = self.phase_after(state.calls)
        if self.phases[phase].width != self.width:  # a warm-up has no queue
            phase = -1
        try:
            results = self._executor_of(phase).drain(state)
        except OwnCollectiveError as error:
            results = self._one_program(phase, error).drain(state)
        state, infos, alike = results
        self._lead.check_all(alike)
        return self.known_pairs.remember(state), infos

    @without_mesh()
    def lower(
        self,
        state: PipelineState,
        batch: Tree,
        shared: Tree = None,
        *,
        own_options: bool = True,
    ) -> jax.stages.Lowered:
        """Lowers the program in which a step computes, without running it.

        The lowered program can be read, searched for collectives, or compiled.

        Args:
          state: State, or its shapes, such as `train.abstract_state(params)`.
          batch: Global batch, as arrays or `jax.ShapeDtypeStruct`s.
          shared: As for `step`, as arrays or `jax.ShapeDtypeStruct`s.
          own_options: Whether the program has the compiler options of the step. Without
            them, it can be compiled with others.

        Returns:
          The `jax.stages.Lowered` of the program that `step` runs after the warm-up and
          after the last boundary of a schedule. With the host executor, it is the
          compute alone, without the all-reduce.

        Raises:
          ValueError: As in `step`.
        """
        self._check(state)
        inputs = inputs_on_mesh(self.config, batch, shared)
        return self.executor.lower(state, inputs, own_options=own_options)

    @without_mesh()
    def transfers(
        self, state: PipelineState, batch: Tree, shared: Tree = None
    ) -> tuple[Transfer, ...]:
        """Lists what one step sends, collective by collective, without running it.

        Args:
          state: State, or its shapes.
          batch: Global batch, as arrays or `jax.ShapeDtypeStruct`s.
          shared: As for `step`, as arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          Kind, number of devices and bytes of each collective of a step after the last
          boundary of a schedule. Collectives of `loss_fn` and `tx` come first: if there
          are any, both are compiled to find them. The collectives of the exchange
          follow.
        """
        self._check(state)
        inputs = inputs_on_mesh(self.config, batch, shared)
        return transfers_of(self.config, state, inputs)

    @without_mesh()
    def ready_after(
        self, state: PipelineState, batch: Tree, shared: Tree = None
    ) -> Any:
        """Returns when each gradient is computed, as a share of a step's FLOPs.

        The FLOPs are those of matmuls and convolutions of one device, in the order of
        the traced program. Nothing is compiled.

        Args:
          state: State, or its shapes.
          batch: Global batch, as arrays or `jax.ShapeDtypeStruct`s.
          shared: As for `step`, as arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          Pytree like the parameters, with a number from 0 to 1 for each of them, and
          `None` for frozen parameters, which have no gradient.

        Raises:
          ValueError: As in `step`.
        """
        self._check(state)
        inputs = inputs_on_mesh(self.config, batch, shared)
        in_flight = state.in_flight._replace(codec_states={})
        return ready_after(self.config, common_of(state), in_flight, inputs)

    @without_mesh()
    def whole_params(self, state: PipelineState) -> optax.Params:
        """Returns copies of the parameters, whole on every device or group.

        With a sharded optimizer, this gathers the pieces of all devices, and all
        processes must call it. No step overwrites the copies.

        Args:
          state: State that `init`, `step` or `drain` returned.

        Returns:
          The parameters, in their own dtypes. On a mesh with inner axes, the devices of
          a group shard them as they shard `state.params`.

        Examples:
          >>> import jax.numpy as jnp, optax, pipejax as pj
          >>> loss_fn = lambda w, batch: ((w - batch) ** 2).mean()
          >>> mesh = pj.data_mesh(1)
          >>> train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh)
          >>> train.whole_params(train.init(jnp.ones(2)))
          Array([1., 1.], dtype=float32)
        """
        self._check(state)
        self.join()  # Only one thread may launch collectives.
        leaves, structure = jax.tree.flatten(state.params)
        specs = state.shards.params or (P(),) * len(leaves)
        places = [NamedSharding(self.mesh, spec) for spec in specs]
        return jax.jit(_copies, out_shardings=jax.tree.unflatten(structure, places))(
            state.params
        )

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the compiler options of the step, without any that are refused."""
        return self.executor.compiler_options

    @functools.cached_property
    def plain(self) -> "TrainStep":
        """Returns the synchronous twin, the same step at width 1 without a warm-up."""
        triples = zip(self.boundaries, self.earlier, self.phases[1:], strict=True)
        # The end of a warm-up is no boundary, unless the all-reduce changes there.
        kept = [(n, a) for n, a, b in triples if a.all_reduce is not b.all_reduce]
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, width=1),
            earlier=tuple(dataclasses.replace(x, width=1) for _, x in kept),
            boundaries=tuple(end for end, _ in kept),
        )

    @property
    def executor(self) -> Executor:
        """Returns the executor of steps after the warm-up and the last boundary.

        Its attributes `name` and `reason` say which executor it is, and why.
        """
        return self._executors[-1]

    @functools.cached_property
    def _executors(self) -> list[Executor]:
        return [choose(self.executor_name, config) for config in self.phases]

    @property
    def phases(self) -> tuple[StepConfig, ...]:
        """Returns the configuration of every phase of a run."""
        return (*self.earlier, self.config)

    @property
    def settings(self) -> Settings:
        """Returns what each device is told to do in a step."""
        return self.config.step.settings

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh of devices."""
        return self.config.mesh

    @property
    def width(self) -> int:
        """Returns the width K of the pipeline."""
        return self.config.width

    @property
    def axis_name(self) -> AxisName:
        """Returns the mesh axis of the data, or a tuple of axes."""
        return self.config.axis_name

    def _begun(self, state: PipelineState, *, abstract: bool = False) -> PipelineState:
        """Returns a new state with the states of its codecs, and a counter of calls."""
        mesh = self.executor.reduction_mesh
        states = codec_states(self.phases, mesh, state, abstract=abstract)
        in_flight = state.in_flight._replace(codec_states=states)
        calls = np.int32(0) if self.boundaries else None
        return state._replace(in_flight=in_flight, calls=calls)

    def _check(self, state: PipelineState) -> None:
        check_state(state, self.config.data.device_set, counted=bool(self.boundaries))
        inner = inner_axes(self.mesh, self.axis_name)
        check_kind(state, inner, sharded=self.config.step.shards_optimizer)
        self.known_pairs.check(state)
        config = self.config
        check_in_flight(state.in_flight, self.width, config.devices, config.messages)
        kept = state.in_flight.codec_states
        form = form_of((state.params, state.opt_state, kept))
        if form not in self._checked.forms:
            check_optimizer_of(state, self.settings.tx)
            check_codec_states(self.phases, self.executor.reduction_mesh, state)
            self._checked.forms.add(form)

    def phase_after(self, calls: Any) -> int:
        """Returns the index in `phases` of the step that follows these calls."""
        return (
            bisect.bisect_right(self.boundaries, int(calls)) if self.boundaries else 0
        )

    def _executor_of(self, phase: int) -> Executor:
        """Returns the executor of a phase; all others drop their last exchanges."""
        executor = self._executors[phase]
        for other in self._executors:
            if other is not executor and isinstance(other, Host):
                other.forget()
        return executor

    def _one_program(self, phase: int, error: OwnCollectiveError) -> Executor:
        """Returns the fused executor, if `executor="auto"` may choose it.

        That a loss or an optimizer has a collective between processes is known when its
        program is compiled. Every process compiles the same, and so chooses the same.
        """
        if self.executor_name != "auto":
            raise error
        fused = Fused(self._executors[phase].config, error.reason)
        self._executors[phase] = fused
        return fused


def _copies(params: optax.Params) -> optax.Params:
    return jax.tree.map(jnp.copy, params)

"""Runs local steps on a mesh, as `make_local_step` has made them."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from pipejax._core.executors import (
    FusedRounds,
    HostRounds,
    Rounds,
    StepConfig,
    check_round_codecs,
    check_round_optimizers,
    check_rounds,
    join,
)
from pipejax._core.rounds import Arrival, LocalState, RoundInfo, RoundPassengers
from pipejax._core.step import common_of
from pipejax._internal.mesh import AxisName, without_mesh
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.structures import form_of
from pipejax._internal.types import Tree
from pipejax.collectives import Transfer

from ._feed import data_sharding, global_batch
from ._finite import check_model_state
from ._init import Arguments, Plan, initial, planned
from ._inputs import example_inputs, inputs_on_mesh, step_inputs
from ._lead import Lead
from ._once import Checked
from ._timed_schedule import timed_schedule
from ._transfers import transfers_of_round


@dataclasses.dataclass(frozen=True, eq=False)
class LocalTrainStep:
    """A local step and its settings, which `make_local_step` returns.

    The methods are pure: everything that changes is in the `LocalState` that they take
    and return.
    """

    rounds: Rounds  # the executor, with all settings
    _checked: Checked = dataclasses.field(default_factory=Checked)
    _lead: Lead = dataclasses.field(default_factory=Lead)

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
    ) -> LocalState:
        """Makes the state before the first step, in which all groups are the same.

        Args:
          params: Pytree of floating arrays. On a mesh with inner axes, each keeps the
            `NamedSharding` that it comes with.
          model_state: As for `TrainStep.init`. Rounds average the same leaves.
          rng: As for `TrainStep.init`. Every group gets keys of its own.
          opt_state: State of the inner optimizer to continue from, such as that of a
            synchronous warm-up. All groups begin with it. `None` makes a new one.
          batch: As for `TrainStep.init`. With `sync_every="auto"`, all processes must
            give arrays, because steps with this batch are timed.
          shared: As for `step`, if `loss_fn` takes it and `batch` is given.

        Returns:
          A `LocalState`, which holds copies.

        Raises:
          ValueError: As for `TrainStep.init`, or if steps must be timed and `batch` is
            missing or holds shapes.
        """
        join()  # Only one thread may launch collectives.
        arguments = Arguments(params, model_state, rng, opt_state)
        inputs = example_inputs(self._config, batch, shared)
        plan = planned(self._config, arguments, inputs)
        rounds = self.rounds.config
        settings = {
            "sync_every": rounds.schedule,
            "warmup_steps": rounds.warmup_steps,
            "executor": self.executor.name,
        }
        state = initial([self._config], arguments, plan, settings)
        check_model_state(self._config, state, inputs)
        args = common_of(state), _sent(plan)
        if rounds.schedule is not None:
            return self.rounds.init(*args)

        def make(schedule: RoundSchedule) -> LocalState:
            return self.rounds.init(*args, schedule=schedule)

        return make(timed_schedule(self.rounds, make, batch, inputs))

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
    ) -> LocalState:
        """Returns the shapes, dtypes and shardings of the state that `init` makes.

        Nothing is computed or placed, so the devices of the mesh need not be attached.

        Args:
          params: Parameters, as arrays or shapes. Those that have a sharding keep it.
          model_state: As for `init`, or shapes.
          rng: As for `init`, or shapes.
          opt_state: As for `init`, or shapes.
          batch: As for `init`.
          shared: As for `init`.

        Returns:
          A `LocalState` in which shapes stand for arrays. With `sync_every="auto"`, its
          round has one step; `checkpoint.restore` takes the rounds of the checkpoint.

        Raises:
          ValueError: As in `init`, for what does not depend on values.
        """
        arguments = Arguments(params, model_state, rng, opt_state)
        inputs = example_inputs(self._config, batch, shared)
        plan = planned(self._config, arguments, inputs)
        return self.rounds.init(common_of(plan.shapes), _sent(plan), abstract=True)

    @without_mesh()
    def step(
        self, state: LocalState, batch: Tree, shared: Tree = None
    ) -> tuple[LocalState, RoundInfo]:
        """Takes a step of every group with its share of the batch.

        Beside it, a chunk is exchanged, if this step has one. The call waits as that of
        `TrainStep.step` does.

        Args:
          state: State that `init`, `step` or `drain` returned.
          batch: Pytree of arrays whose leading axis is the global batch, as for
            `TrainStep.step`.
          shared: As for `TrainStep.step`.

        Returns:
          The next state, and a `RoundInfo`.

        Raises:
          ValueError: If the batch does not divide, if an array of `shared` is split
            over the groups, if the state has other groups or another number of chunks,
            if processes take other steps or batches of other shapes, or if the
            call is inside `jax.jit` or another transformation.
        """
        self._check(state)
        inputs = step_inputs(self._config, self._checked, state, batch, shared)
        self._lead.wait()
        state, info, alike = self.rounds.step(state, inputs)
        self._lead.add(info.local_loss, alike)
        if alike is not None and self._checked.is_new(inputs.batch):
            self._lead.check_all()  # as in `TrainStep`
        return state, info

    @without_mesh()
    def batch(self, local: Any, *, axis_name: AxisName | None = None) -> Any:
        """Makes the global batch of which this process has the part `local`.

        Args:
          local: Pytree of arrays, as for `TrainStep.batch`.
          axis_name: As for `TrainStep.batch`: with `("host", "device")`, the devices of
            a group split its share.

        Returns:
          The same pytree of global `jax.Array`s, with one share on each device.

        Raises:
          ValueError: If the part does not divide among the devices of this process, or
            if `axis_name` does not begin with the axes of the groups.
        """
        return global_batch(local, data_sharding(self._config, axis_name))

    def join(self) -> None:
        """Waits until no exchange is under way; what has not arrived stays in flight.

        As for `TrainStep.join`.
        """
        join()

    @without_mesh()
    def drain(self, state: LocalState) -> tuple[LocalState, tuple[Arrival, ...]]:
        """Exchanges everything that groups have changed, so that all are the same.

        Args:
          state: State that `init`, `step` or `drain` returned.

        Returns:
          The state, at the beginning of a round, in which every group has the
          parameters of the anchor, and the report of the steps since the last one, if
          there are any.
        """
        self._check(state)
        state, reports, alike = self.rounds.drain(state)
        self._lead.check_all(alike)
        return state, reports

    @without_mesh()
    def lower(
        self,
        state: LocalState,
        batch: Tree,
        shared: Tree = None,
        *,
        own_options: bool = True,
    ) -> jax.stages.Lowered:
        """Lowers the program of a step with the first chunk beside it, not running it.

        Args:
          state: State, or its shapes.
          batch: Global batch, as arrays or `jax.ShapeDtypeStruct`s.
          shared: As for `step`, or shapes.
          own_options: Whether the program has the compiler options of the step. Without
            them, it can be compiled with others.

        Returns:
          The `jax.stages.Lowered`. With `overlap_steps=0`, it is that of a step inside
          a round, which exchanges nothing.

        Raises:
          ValueError: As in `step`.
        """
        self._check(state)
        inputs = inputs_on_mesh(self._config, batch, shared)
        return self.rounds.lower(state, inputs, own_options=own_options)

    @without_mesh()
    def transfers(
        self,
        state: LocalState,
        batch: Tree,
        shared: Tree = None,
        *,
        chunk: int | None = None,
    ) -> tuple[Transfer, ...]:
        """Lists what a round sends, collective by collective, without running it.

        Args:
          state: State, or its shapes.
          batch: Global batch, as arrays or `jax.ShapeDtypeStruct`s.
          shared: As for `step`, as arrays or `jax.ShapeDtypeStruct`s.
          chunk: Number of a chunk, from 0, to list only the step that exchanges it. The
            report of the round, and the changes of the model state, travel with the
            last one. `None` lists all steps of a round, one after another.

        Returns:
          Kind, number of devices and bytes of each collective after the warm-up. In
          every step, collectives inside groups, and those of `loss_fn` and `tx`, come
          first: if there are any, the step is compiled to find them. The collectives of
          its chunk follow.

        Raises:
          ValueError: As in `step`, or if there is no such chunk.
        """
        self._check(state)
        inputs = inputs_on_mesh(self._config, batch, shared)
        return transfers_of_round(self.rounds.config, state, inputs, chunk)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the compiler options of the step, without any that are refused."""
        return self.rounds.executor.compiler_options

    @property
    def executor(self) -> FusedRounds | HostRounds:
        """Returns what runs the steps, with its `name` and the `reason` for it."""
        return self.rounds.executor

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of devices."""
        return self._config.mesh

    @property
    def axis_name(self) -> AxisName:
        """Returns the mesh axis of the groups, or a tuple of axes."""
        return self._config.axis_name

    @property
    def _config(self) -> StepConfig:
        return self.rounds.config.inner

    def _check(self, state: LocalState) -> None:
        check_rounds(self.rounds.config, state)
        trained, shared = state.local.trainable, state.shared
        exchanged = shared.anchor, shared.outer, state.own.codec_states
        form = form_of((trained.params, trained.opt_state, exchanged))
        if form not in self._checked.forms:
            check_round_optimizers(self.rounds.config, state)
            mesh = self.rounds.executor.reduction_mesh
            check_round_codecs(self.rounds.config, mesh, state)
            self._checked.forms.add(form)


def _sent(plan: Plan) -> RoundPassengers:
    """Returns the form of what a group sends with a round."""
    return RoundPassengers(plan.message.passengers, plan.message.changes)

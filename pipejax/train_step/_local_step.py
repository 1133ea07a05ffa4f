"""Runs local steps on a mesh, as `make_local_step` has made them."""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.checks import (
    check_arrays,
    check_batch,
    check_keys,
    check_opt_state,
    check_params,
)
from pipejax._core.executors import FusedRounds, HostRounds, Rounds, join
from pipejax._core.message import Passengers
from pipejax._core.rounds import Arrival, LocalState, RoundInfo
from pipejax._core.step import Inputs, InputSpecs, inputs_over
from pipejax._internal.mesh import without_mesh
from pipejax._internal.shards import UNSHARDED
from pipejax._internal.types import Tree

from ._feed import check_global, data_sharding, global_batch, laid_out, plain_batch
from ._replicate import placed

_INNER = (
    "Give the state of the inner optimizer, or leave it out to begin with a new one."
)


@dataclasses.dataclass(frozen=True, eq=False)
class LocalTrainStep:
    """A local step and its settings, which `make_local_step` returns.

    The methods are pure: everything that changes is in the `LocalState` that they take
    and return.

    Attributes:
      rounds: The executor, with all settings.
    """

    rounds: Rounds

    @without_mesh()
    def init(
        self,
        params: optax.Params,
        *,
        model_state: Any = None,
        rng: Any = None,
        opt_state: optax.OptState | None = None,
        batch: Any = None,
    ) -> LocalState:
        """Makes the state before the first step, in which all groups are the same.

        Args:
          params: Pytree of floating arrays.
          model_state: As for `TrainStep.init`.
          rng: As for `TrainStep.init`. Every group gets keys of its own.
          opt_state: State of the inner optimizer to continue from, such as that of a
            synchronous warm-up. All groups begin with it. `None` makes a new one.
          batch: One batch, as arrays or shapes, if `loss_fn` returns metrics or a
            weight.

        Returns:
          A `LocalState`, which holds copies.

        Raises:
          ValueError: If an argument cannot be used, or `opt_state` does not fit.
        """
        check_params(params)
        check_arrays("model_state", model_state)
        check_keys(rng)
        if opt_state is not None:
            tx = self.rounds.config.inner.step.settings.tx
            check_opt_state(tx, params, opt_state, "opt_state", _INNER)
        report = self._report(params, model_state, rng, batch)
        join()  # Only one thread may launch collectives.
        given = {"params": params, "model_state": model_state, "rng": rng}
        given["opt_state"] = opt_state
        arrays = placed(given, jax.tree.map(lambda _: P(), given), self.mesh)
        return self.rounds.init(**arrays, report=report)

    @without_mesh()
    def step(self, state: LocalState, batch: Tree) -> tuple[LocalState, RoundInfo]:
        """Takes a step of every group with its share of the batch.

        Beside it, a chunk of the last round is exchanged, if one is left.

        Args:
          state: State that `init`, `step` or `drain` returned.
          batch: Pytree of arrays whose leading axis is the global batch, as for
            `TrainStep.step`.

        Returns:
          The next state, and a `RoundInfo`.

        Raises:
          ValueError: If the batch does not divide, or the state is of a local step with
            other rounds or groups.
        """
        self.rounds.check(state)
        return self.rounds.step(state, self._inputs(batch))

    @without_mesh()
    def batch(self, local: Any) -> Any:
        """Makes the global batch of which this process has the part `local`.

        Args:
          local: Pytree of arrays, as for `TrainStep.batch`.

        Returns:
          The same pytree of global `jax.Array`s, with one share on each device.

        Raises:
          ValueError: If the part does not divide among the devices of this process.
        """
        return global_batch(local, data_sharding(self.rounds.config.inner, None))

    def join(self) -> None:
        """Waits until no exchange is under way; what has not arrived stays in flight.

        As for `TrainStep.join`.
        """
        join()

    @without_mesh()
    def drain(self, state: LocalState) -> tuple[LocalState, tuple[Arrival, ...]]:
        """Exchanges everything that groups have changed, so that all are the same.

        What is under way is completed first. The progress since is a round of its own,
        if there is any.

        Args:
          state: State that `init`, `step` or `drain` returned.

        Returns:
          The state, at the beginning of a round, in which every group has the
          parameters of the anchor, and the reports of the rounds that have arrived.
        """
        self.rounds.check(state)
        return self.rounds.drain(state)

    @without_mesh()
    def lower(self, state: LocalState, batch: Tree) -> jax.stages.Lowered:
        """Lowers the program of a step that exchanges a chunk, without running it.

        Args:
          state: State, or its shapes.
          batch: Global batch, as arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          The `jax.stages.Lowered`. With `overlap_steps=0`, it is that of a step inside
          a round, which exchanges nothing.

        Raises:
          ValueError: As in `step`.
        """
        return self.rounds.lower(state, self._inputs(batch))

    @property
    def executor(self) -> FusedRounds | HostRounds:
        """Returns what runs the steps, with its `name` and the `reason` for it."""
        return self.rounds.executor

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of devices."""
        return self.rounds.config.inner.mesh

    def _inputs(self, batch: Tree) -> Inputs:
        config, batch = self.rounds.config.inner, plain_batch(batch)
        check_global(batch, config.mesh)
        check_batch(batch, config.devices, config.step.settings.microbatches)
        return Inputs(laid_out(batch, config)[0], None, InputSpecs())

    def _report(
        self, params: optax.Params, model_state: Any, rng: Any, batch: Any
    ) -> Passengers:
        """Returns the form of what a step reports."""
        config = self.rounds.config.inner
        if batch is None:
            shapes = config.empty_messages(params, model_state, UNSHARDED)
            return shapes[0].passengers
        inputs = inputs_over(config.axis_name)
        local = config.on_mesh(
            lambda *args: config.step.message(*args)[0].passengers,
            (P(), P(), P(), inputs),
            P(),
        )
        return jax.eval_shape(local, params, model_state, rng, self._inputs(batch))

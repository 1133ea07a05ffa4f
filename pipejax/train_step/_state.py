"""Defines what a train step carries from one step to the next."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from pipejax.message import InFlight
from pipejax.shards import UNSHARDED, Shards, constrained, optimizer_specs


class PipelineState(NamedTuple):
    """Everything that a run needs to continue, as one pytree.

    Every device has a copy of parameters, optimizer state and model state. On a mesh
    with inner axes, every group has a copy, which its devices may shard.

    Attributes:
      params: Parameters.
      opt_state: State of the Optax transformation.
      model_state: State of the model that is not trained, such as batch-norm
        statistics. `None` if the model has no such state.
      in_flight: Messages that are computed but not yet applied: gradients with their
        passengers and changes of model state.
      rng: PRNG key from which each step splits its own. `None` if there is no key.
      skipped: int32, the number of updates skipped so far because a reduced gradient or
        change of model state was not finite.
      step: int32, the number of calls of `train.step` so far.
      calls: The same number, kept on the host. It is there if the next program depends
        on it (warm-up, schedules), and before the first step if the model state is not
        finite, which that step then checks. Otherwise `None`.
      shards: How the devices of a group shard the arrays. It has no leaves.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    in_flight: InFlight
    rng: jax.Array | None
    skipped: jax.Array
    step: jax.Array
    calls: Any
    shards: Shards = UNSHARDED


class ReplicatedState(NamedTuple):
    """The part of a `PipelineState` that is the same on all devices, or in all groups.

    With `donate=True`, both executors may overwrite it in a step. Messages in flight
    are kept apart from it, because the host executor must not overwrite them: the
    communication thread may still be sending them.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    rng: jax.Array | None
    skipped: jax.Array
    step: jax.Array
    shards: Shards = UNSHARDED

    @classmethod
    def of(cls, state: PipelineState) -> "ReplicatedState":
        """Returns the replicated part of `state`."""
        return cls(*(getattr(state, name) for name in cls._fields))

    def with_in_flight(self, in_flight: InFlight, calls: Any) -> PipelineState:
        """Returns the whole state, with these messages in flight and this counter."""
        return PipelineState(**self._asdict(), in_flight=in_flight, calls=calls)

    def specs(self) -> "ReplicatedState":
        """Returns the partition spec of every leaf over inner axes."""
        nothing, shards = jax.tree.map(lambda _: P(), self), self.shards
        if not shards:
            return nothing
        opt_state = optimizer_specs(self.opt_state, self.params, shards.params)
        params, model_state = map(jax.tree.structure, (self.params, self.model_state))
        return nothing._replace(
            params=jax.tree.unflatten(params, shards.params),
            opt_state=opt_state,
            model_state=jax.tree.unflatten(model_state, shards.model_state),
        )

    def in_place(self) -> "ReplicatedState":
        """Returns the state, whose arrays XLA must split as `specs` say.

        Must be called inside the program of a step.
        """
        return constrained(self, self.specs()) if self.shards else self


class Kept(NamedTuple):
    """The values that `compute` leaves for the update of the same step.

    Attributes:
      model_state: Model state as this device's loss left it.
      rng: Key for the next step.
      step: Number of calls of `train.step`, this call included.
    """

    model_state: Any
    rng: jax.Array | None
    step: jax.Array


class Aux(NamedTuple):
    r"""Holds what a loss function returns beside its loss: `return loss, Aux(...)`.

    With a weight `W_i` for part i of the global batch (a microbatch of a device), the
    gradients `g_i`, losses and metrics of all parts are averaged by weight:

    $$g = \sum_i W_i g_i / \sum_i W_i$$

    Attributes:
      metrics: Pytree of real scalars, averaged over microbatches and devices.
      model_state: Model state after this batch, in the structure and shapes that
        `train.init` was given.
      weight: Nonnegative scalar W, the number of tokens or examples over which the loss
        is a mean. It must not depend on the parameters, since no gradient is taken
        through it. A part of weight 0 contributes nothing. `None` gives all parts the
        same weight.
    """

    metrics: Any = None
    model_state: Any = None
    weight: Any = None

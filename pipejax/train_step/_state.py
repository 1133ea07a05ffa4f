"""Defines what a train step carries from one step to the next."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import InFlight
from pipejax._core.prediction import Mean, Slopes
from pipejax._internal.mesh import AxisName, axes
from pipejax._internal.shards import (
    UNSHARDED,
    Shards,
    constrained,
    cut_spec,
    optimizer_specs,
    over,
)


class PipelineState(NamedTuple):
    """Everything that a run needs to continue, as one pytree.

    Every device has a copy of parameters, optimizer state and model state. On a mesh
    with inner axes, every group has a copy, which its devices may shard. With
    `shard_optimizer`, parameters and optimizer state are split over all devices, and
    every device has a copy of `gathered`.

    Attributes:
      params: Parameters.
      opt_state: State of the Optax transformation.
      model_state: State of the model that is not trained, such as batch-norm
        statistics. `None` if the model has no such state.
      in_flight: Messages that are computed but not yet applied: gradients with their
        passengers and changes of model state.
      rng: PRNG key from which each step splits its own, or a pytree of keys. `None` if
        there is no key.
      skipped: int32, the number of updates skipped so far because a reduced gradient or
        change of model state was not finite.
      step: int32, the number of calls of `train.step` so far.
      calls: The same number, kept on the host. It is there if the next program depends
        on it (warm-up, schedules), and before the first step if the model state is not
        finite, which that step then checks. Otherwise `None`.
      shards: How the devices of a group shard the arrays. It has no leaves.
      gathered: The whole parameters that every device has with a sharded optimizer, in
        `compute_dtype`. With weight prediction, this is the part of every device's
        prediction that does not depend on its own gradients. Otherwise `None`.
      mean: The mean gradient that was applied last, if weight prediction needs it. It
        is split as the parameters are.
      slopes: By how much an update changes with its gradient, element by element, if
        weight prediction needs it with a sharded optimizer. Otherwise `None`.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    in_flight: InFlight
    rng: Any
    skipped: jax.Array
    step: jax.Array
    calls: Any
    shards: Shards = UNSHARDED
    gathered: Any = None
    mean: Mean | None = None
    slopes: Slopes | None = None


class SharedState(NamedTuple):
    """The part of a `PipelineState` that all devices, or all groups, share.

    Every device has a copy of it, or with a sharded optimizer its pieces of parameters
    and optimizer state.

    With `donate=True`, both executors may overwrite it in a step. Messages in flight
    are kept apart from it, because the host executor must not overwrite them: the
    communication thread may still be sending them.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    rng: Any
    skipped: jax.Array
    step: jax.Array
    shards: Shards = UNSHARDED
    gathered: Any = None
    mean: Mean | None = None
    slopes: Slopes | None = None

    @classmethod
    def of(cls, state: PipelineState) -> "SharedState":
        """Returns the shared part of `state`."""
        return cls(*(getattr(state, name) for name in cls._fields))

    def with_in_flight(self, in_flight: InFlight, calls: Any) -> PipelineState:
        """Returns the whole state, with these messages in flight and this counter."""
        return PipelineState(**self._asdict(), in_flight=in_flight, calls=calls)

    def specs(self) -> "SharedState":
        """Returns the partition spec of every leaf over inner axes."""
        nothing, shards = jax.tree.map(lambda _: P(), self), self.shards
        if not shards:
            return nothing
        structure = jax.tree.structure(self.model_state)
        nothing = nothing._replace(
            model_state=jax.tree.unflatten(structure, shards.model_state)
        )
        if self.params is None:  # see `without_learned`
            return nothing
        opt_state = optimizer_specs(self.opt_state, self.params, shards.params)
        if shards.opt_state:
            opt_state = specs_over(shards.opt_state, self.opt_state, shards.inner)
        in_group = jax.tree.unflatten(jax.tree.structure(self.params), shards.params)
        return nothing._replace(
            params=in_group,
            opt_state=opt_state,
            gathered=None if self.gathered is None else in_group,
            mean=_with_gradients(nothing.mean, in_group),
            slopes=_with_codes(nothing.slopes, in_group),
        )

    def over_data(self, axis_name: AxisName) -> Any:
        """Returns the partition specs of the leaves over the axes of the data.

        Must be called outside of the program of a step, where arrays are whole.

        Args:
          axis_name: Axis or axes of the data.
        """
        learned = self.learned
        if learned is None:
            return P()
        specs = learned.over_data(axis_name)
        return jax.tree.map(lambda _: P(), self).with_learned(specs)

    @property
    def learned(self) -> "Learned | None":
        """Returns what the exchange updates, with a sharded optimizer, or `None`."""
        if not self.shards.cuts:
            return None
        return Learned(**{name: getattr(self, name) for name in Learned._fields})

    def with_learned(self, learned: Any) -> "SharedState":
        """Returns the state with what an exchange has updated, unless it is `None`."""
        if learned is None:
            return self
        return self._replace(**learned._asdict())

    def without_learned(self) -> "SharedState":
        """Returns the state without what the exchange updates."""
        if self.learned is None:
            return self
        nothing: dict[str, Any] = dict.fromkeys(Learned._fields)
        return self._replace(**nothing | {"shards": self.shards})

    def in_place(self) -> "SharedState":
        """Returns the state, whose arrays XLA must split as `specs` say.

        Must be called inside the program of a step.
        """
        return constrained(self, self.specs()) if self.shards else self


class Learned(NamedTuple):
    """The part of a state that the exchange updates, with a sharded optimizer.

    Attributes:
      params: Parameters, split over the axes of the data.
      opt_state: State of the Optax transformation, split in the same way.
      gathered: The whole parameters that every device has.
      mean: The mean gradient that was applied last, split in the same way, or `None`.
      slopes: By how much an update changes with its gradient, or `None`.
      shards: How the arrays are split.
    """

    params: Any
    opt_state: Any
    gathered: Any
    mean: Mean | None
    slopes: Slopes | None
    shards: Shards

    def over_data(self, axis_name: AxisName) -> "Learned":
        """Returns the partition specs of the leaves over the axes of the data.

        Must be called outside of the program of a step, where arrays are whole.

        Args:
          axis_name: Axis or axes of the data.
        """
        specs = tuple(cut_spec(cut, axis_name) for cut in self.shards.cuts)
        split = jax.tree.unflatten(jax.tree.structure(self.params), specs)
        nothing, names = jax.tree.map(lambda _: P(), self), axes(axis_name)
        return nothing._replace(
            params=split,
            opt_state=specs_over(self.shards.opt_state, self.opt_state, names),
            mean=_with_gradients(nothing.mean, split),
        )


def _with_gradients(mean: Any, specs: Any) -> Any:
    """Returns the specs of a mean whose gradients are split by `specs`."""
    if mean is None or mean.gradients is None:
        return mean
    return mean._replace(gradients=specs)


def _with_codes(slopes: Any, specs: Any) -> Any:
    """Returns the specs of slopes that are split by `specs`."""
    if slopes is None:
        return None
    return slopes._replace(codes=(specs,) * len(slopes.codes))


def specs_over(specs: Sequence[P], tree: Any, names: Collection[str]) -> Any:
    """Returns the parts over some axes of the specs of a pytree, as a pytree like it.

    Args:
      specs: A spec for each leaf.
      tree: The pytree.
      names: The names of the axes.
    """
    parts = [over(spec, names) for spec in specs]
    return jax.tree.unflatten(jax.tree.structure(tree), parts)


def whole_params(state: Any) -> Any:
    """Returns the shapes and dtypes of the whole parameters of a state.

    Inside the program of a step with a sharded optimizer, `state.params` are pieces.

    Args:
      state: A `PipelineState` or `SharedState`, or its shapes.
    """
    if state.gathered is None:
        return state.params
    return jax.tree.map(
        lambda whole, own: jax.ShapeDtypeStruct(whole.shape, own.dtype),
        state.gathered,
        state.params,
    )


class Kept(NamedTuple):
    """The values that `compute` leaves for the update of the same step.

    Attributes:
      model_state: Model state as this device's loss left it.
      rng: Key for the next step.
      step: Number of calls of `train.step`, this call included.
    """

    model_state: Any
    rng: Any
    step: jax.Array


class Aux(NamedTuple):
    r"""Holds what a loss function returns beside its loss: `return loss, Aux(...)`.

    With a weight `W_i` for part i of the global batch (a microbatch of a device), the
    gradients `g_i`, losses and metrics of all parts are averaged by weight:

    $$g = \sum_i W_i g_i / \sum_i W_i$$

    Attributes:
      metrics: Pytree of real scalars, averaged over microbatches and devices.
      model_state: Model state after this batch, in the structure and shapes that
        `train.init` was given. Leaves that are returned unchanged, as the same objects,
        are not sent. Each microbatch moves the model state once.
      weight: Nonnegative scalar W, the number of tokens or examples over which the loss
        is a mean. It must not depend on the parameters, since no gradient is taken
        through it. A part of weight 0 contributes nothing. `None` gives all parts the
        same weight.
    """

    metrics: Any = None
    model_state: Any = None
    weight: Any = None

"""Defines what a train step carries from one step to the next.

A `PipelineState` has two parts, which are kept apart everywhere:

- Values that are the same on all devices, or on all groups of devices: what is trained,
  the model state, keys and counters. A sharded optimizer splits some of them.
- `in_flight`, the messages that each device has made and that are not applied yet.

Inside the program of a step, the two parts are separate arguments: a `Common` and an
`InFlight`. With `donate=True`, a step may overwrite the first part.
"""

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
    data_spec,
    optimizer_specs,
    over,
)
from pipejax._internal.structures import merged
from pipejax._internal.types import Keys, ModelState, Specs, Tree


class Trainable(NamedTuple):
    """Everything that an update changes.

    Every device has a copy. On a mesh with inner axes, every group has a copy, which
    its devices may shard. With `shard_optimizer`, parameters, optimizer state and mean
    are split over all devices, and every device has a copy of `gathered`.

    Attributes:
      mean: The mean gradient that was applied last, if weight prediction needs it.
      gathered: The whole parameters that every device has with a sharded optimizer, in
        `compute_dtype`. With weight prediction, this is the part of every device's
        prediction that does not depend on its own gradients. Otherwise `None`.
      slopes: By how much an update changes with its gradient, element by element, if
        weight prediction needs it with a sharded optimizer. Otherwise `None`.
      delayed_counters: Pytree like `opt_state`, if some gradients are delayed and
        others are not: the leaves that belong to no parameter, as delayed parameters
        have them, and `None` for all others. `opt_state` holds those of the parameters
        that are not delayed.
      shards: How the devices of a group shard all arrays of the state. It has no
        leaves.
    """

    params: optax.Params
    opt_state: optax.OptState
    mean: Mean | None = None
    gathered: optax.Params | None = None
    slopes: Slopes | None = None
    delayed_counters: Tree = None
    shards: Shards = UNSHARDED

    @property
    def whole_params(self) -> optax.Params:
        """Returns the parameters, or shapes and dtypes of the whole ones.

        Inside the program of a step with a sharded optimizer, `params` are pieces.
        """
        if self.gathered is None:
            return self.params
        return jax.tree.map(
            lambda whole, own: jax.ShapeDtypeStruct(whole.shape, own.dtype),
            self.gathered,
            self.params,
        )


class PipelineState(NamedTuple):
    """Everything that a run needs to continue, as one pytree.

    Attributes:
      trainable: Parameters, optimizer state, and what weight prediction needs. Its
        fields are properties of the state, too: `state.params`.
      model_state: State of the model that is not trained, such as batch-norm
        statistics. `None` if the model has no such state.
      in_flight: Messages that are computed but not yet applied: gradients with their
        passengers and changes of model state.
      rng: PRNG key from which each step splits its own, or a pytree of keys. `None` if
        there is no key.
      skipped: int32, the number of updates skipped so far because a reduced gradient or
        change of model state was not finite.
      step: int32, the number of calls of `train.step` so far.
      calls: The same number, kept on the host, if the next program depends on it
        (warm-up, schedules). Otherwise `None`.
    """

    trainable: Trainable
    model_state: ModelState
    in_flight: InFlight
    rng: Keys
    skipped: jax.Array
    step: jax.Array
    calls: Any

    @property
    def params(self) -> optax.Params:
        """Returns the parameters."""
        return self.trainable.params

    @property
    def opt_state(self) -> optax.OptState:
        """Returns the state of the Optax transformation."""
        return self.trainable.opt_state

    @property
    def gathered(self) -> optax.Params:
        """Returns the parameters that every device computes with.

        If the optimizer is sharded over devices, they are other arrays than `params`.
        """
        gathered = self.trainable.gathered
        return self.params if gathered is None else gathered

    @property
    def mean(self) -> Mean | None:
        """Returns the mean gradient that was applied last, if it is kept."""
        return self.trainable.mean

    @property
    def slopes(self) -> Slopes | None:
        """Returns the slopes of the update, if they are kept."""
        return self.trainable.slopes

    @property
    def delayed_counters(self) -> Tree:
        """Returns the counters of delayed parameters, if they have their own."""
        return self.trainable.delayed_counters

    @property
    def shards(self) -> Shards:
        """Returns how the devices of a group shard the arrays."""
        return self.trainable.shards


class Common(NamedTuple):
    """The part of a `PipelineState` that is the same on all devices, by its names."""

    trainable: Trainable
    model_state: ModelState
    rng: Keys
    skipped: jax.Array
    step: jax.Array

    @property
    def shards(self) -> Shards:
        """Returns how the devices of a group shard the arrays."""
        return self.trainable.shards


def common_of(state: PipelineState) -> Common:
    """Returns the part of a state that is the same on all devices."""
    return Common(*(getattr(state, name) for name in Common._fields))


def state_of(common: Common, in_flight: InFlight, calls: Any) -> PipelineState:
    """Undoes `common_of`."""
    return PipelineState(in_flight=in_flight, calls=calls, **common._asdict())


def completed(state: Common, before: Common) -> Common:
    """Returns a state with those leaves of the model state that only `before` has."""
    return state._replace(model_state=merged(state.model_state, before.model_state))


def without_trainable(state: Common) -> Common:
    """Returns the state without what the exchange of a sharded optimizer updates."""
    nothing: Any = None
    return state._replace(trainable=Trainable(nothing, nothing, shards=state.shards))


class Aux(NamedTuple):
    r"""Holds what a loss function returns beside its loss: `return loss, Aux(...)`.

    With a weight `W_i` for part i of the global batch (a microbatch of a device), the
    gradients `g_i`, losses and metrics of all parts are averaged by weight:

    $$g = \sum_i W_i g_i / \sum_i W_i$$

    Attributes:
      metrics: Pytree of real scalars, averaged over microbatches and devices. With a
        weight, a sum must be divided by it first: `x / weight`.
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


def data_specs(trainable: Trainable, axis_name: AxisName) -> Trainable | P:
    """Returns how the arrays that are trained are split over the axes of the data.

    Must be called outside of the program of a step, where arrays are whole.

    Without a sharded optimizer, it is a single spec.
    """
    shards = trainable.shards
    if not shards.data_axes or trainable.params is None:
        return P()
    specs = tuple(data_spec(cut, axis_name) for cut in shards.data_axes)
    split = jax.tree.unflatten(jax.tree.structure(trainable.params), specs)
    nothing: Any = jax.tree.map(lambda _: P(), trainable)
    return nothing._replace(
        params=split,
        opt_state=specs_over(shards.opt_state, trainable.opt_state, axes(axis_name)),
        mean=_with_gradients(nothing.mean, split),
    )


def state_data_specs(state: Common, axis_name: AxisName) -> Specs:
    """Returns how all arrays are split over the axes of the data."""
    specs: Any = jax.tree.map(lambda _: P(), state)
    return specs._replace(trainable=data_specs(state.trainable, axis_name))


def inner_state_specs(state: Common) -> Specs:
    """Returns the partition spec of every array over inner axes."""
    specs: Any = jax.tree.map(lambda _: P(), state)
    trained, shards = state.trainable, state.shards
    if not shards:
        return specs
    structure = jax.tree.structure(state.model_state)
    model_state = jax.tree.unflatten(structure, shards.model_state)
    specs, nothing = specs._replace(model_state=model_state), specs.trainable
    if trained.params is None:
        return specs
    opt_state = optimizer_specs(trained.opt_state, trained.params, shards.params)
    if shards.opt_state:
        opt_state = specs_over(shards.opt_state, trained.opt_state, shards.inner)
    in_group = jax.tree.unflatten(jax.tree.structure(trained.params), shards.params)
    slopes = nothing.slopes
    if slopes is not None:
        slopes = slopes._replace(codes=(in_group,) * len(slopes.codes))
    return specs._replace(
        trainable=nothing._replace(
            params=in_group,
            opt_state=opt_state,
            gathered=None if trained.gathered is None else in_group,
            mean=_with_gradients(nothing.mean, in_group),
            slopes=slopes,
        )
    )


def with_constraints(state: Common) -> Common:
    """Returns the state, whose arrays XLA must split as `inner_state_specs` says.

    Must be called inside the program of a step.
    """
    return constrained(state, inner_state_specs(state)) if state.shards else state


def specs_over(specs: Sequence[P], tree: Tree, names: Collection[str]) -> Specs:
    """Returns the parts of specs over some axes, as a pytree like `tree`."""
    parts = [over(spec, names) for spec in specs]
    return jax.tree.unflatten(jax.tree.structure(tree), parts)


def _with_gradients(mean: Any, specs: Specs) -> Specs:
    """Returns the specs of a mean whose gradients are split by `specs`."""
    if mean is None or mean.gradients is None:
        return mean
    # A frozen parameter has no mean gradient.
    split = jax.tree.map(
        lambda spec, g: None if g is None else spec, specs, mean.gradients
    )
    return mean._replace(gradients=split)

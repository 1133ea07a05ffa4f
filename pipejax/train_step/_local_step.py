"""Runs one device's part of a step, before and after the sum over devices.

1. `compute` makes the message of this batch. The gradient is taken at the device's
   prediction (see `_core.prediction`), or at the parameters as they are, and always at
   the model state to which the device's changes in flight lead.
2. `update` applies the mean of the messages that are due.

The exchange comes between them. If the width is above 1, it sums messages of an earlier
step and needs nothing that `compute` returns, so an executor can run it beside the
compute.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax._core.message import (
    Exchange,
    InFlight,
    Message,
    Reduced,
    arrivals,
    averaging,
    mean,
    mean_as,
)
from pipejax._core.prediction import Kind, Mean, Own, Update, kind_of, predicted
from pipejax._internal.mesh import AxisName
from pipejax._internal.shards import Shards, constrained
from pipejax._internal.traced_axes import collective_axes
from pipejax.collectives import AllReduce

from ._check_inner import warn_of_unused_axes
from ._check_input import check_keywords
from ._check_state import check_mean, check_pending, check_room
from ._feed import Batch
from ._gradient import local_message
from ._info import StepInfo
from ._loss import Loss
from ._model_state import model_state_ahead
from ._state import Kept, SharedState, whole_params
from ._update import advanced, apply_reduced, select, stepped

Rule = Literal["linearized", "own", False]


@dataclasses.dataclass(frozen=True, eq=False)
class LocalStep:
    """A loss and an optimizer as the two halves of a step, inside `shard_map`.

    The attributes are the arguments of `make_train_step` of the same names, and the
    platform of the devices, such as "cpu".
    """

    loss_fn: Loss
    tx: optax.GradientTransformation
    microbatches: int
    compute_dtype: DTypeLike | None
    reduce_dtype: DTypeLike | None
    axis_name: AxisName
    platform: str
    weight_prediction: Rule
    deviation_feedback: float
    skip_nonfinite: bool

    @property
    def shard_optimizer(self) -> bool:
        """Returns whether each device keeps only pieces of the optimizer."""
        return False

    def placed(self, params: Any, message: Message, mesh: Mesh) -> Shards:
        """Returns how all arrays of a state are split.

        Args:
          params: Shapes of the whole parameters.
          message: A message, or its shapes. It says how the parameters are split.
          mesh: The mesh of the train step.
        """
        del params, mesh
        return message.shards

    def in_pieces(self, state: SharedState, specs: Any, count: int) -> SharedState:
        """Returns a whole state as this device keeps it.

        Args:
          state: A state with whole parameters and optimizer state.
          specs: The partition specs of its leaves over the axes of the data.
          count: Number of gradients that will be in flight.
        """
        del specs, count
        return state

    @property
    def optimizer(self) -> Update:
        """Returns the update of the optimizer, as predictions take it."""
        return functools.partial(stepped, self.tx)

    def kind(self, params: Any, count: int, devices: int) -> Kind | None:
        """Returns how the update depends on gradients, if this matters.

        Args:
          params: Shapes of the whole parameters.
          count: Number of gradients in flight, K-1.
          devices: Number of devices, or groups, that share the data.

        Returns:
          The kind, or `None` if nothing is predicted, or by own gradients alone.
        """
        if self.weight_prediction != "linearized" or not count or devices == 1:
            return None
        leaves, structure = jax.tree.flatten(params)
        forms = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
        return self._kinds(structure, forms, count)

    @functools.cached_property
    def _kinds(self) -> Callable[[Any, tuple[Any, ...], int], Kind]:
        """Returns the kinds of update by structure and forms of the parameters.

        An update of many arrays takes seconds to trace, and several programs ask.
        """

        @functools.cache
        def kind(structure: Any, forms: tuple[Any, ...], count: int) -> Kind:
            leaves = [jax.ShapeDtypeStruct(*form) for form in forms]
            params = jax.tree.unflatten(structure, leaves)
            opt_state = jax.eval_shape(self.tx.init, params)
            return kind_of(self.optimizer, params, opt_state, count)

        return kind

    def empty_mean(
        self, params: Any, count: int, devices: int, shards: Shards
    ) -> Mean | None:
        """Returns the mean that predictions need before any is applied, or `None`.

        Args:
          params: The whole parameters, or their shapes.
          count: Number of gradients in flight, K-1.
          devices: Number of devices, or groups, that share the data.
          shards: How the parameters are split.
        """
        del shards
        kind = self.kind(params, count, devices)
        if kind is None or kind.name == "linear":
            return None
        return Mean.empty(params, self.reduce_dtype)

    def compute(
        self, state: SharedState, in_flight: InFlight, batch: Batch
    ) -> tuple[Message, Kept]:
        """Returns this device's message, and what the update will need.

        Raises:
          ValueError: If the messages in flight do not fit the parameters, the model
            state or the metrics, or if the loss function breaks its contract.
        """
        check_pending(state, in_flight, self.reduce_dtype)
        check_mean(state, self._wants_mean(state, in_flight))
        given = {"model_state": state.model_state, "rng": state.rng}
        check_keywords(self.loss_fn, **given)
        rng, key = self._split_rng(state.rng)
        if state.shards:
            args = whole_params(state), state.model_state, key, batch, state.shards
            warn_of_unused_axes(self.loss_fn, *args)
        params = self.point(state, in_flight)
        skips, shards = self.skip_nonfinite, state.shards
        model_state = model_state_ahead(
            state.model_state, in_flight, shards, skip_nonfinite=skips
        )
        room = in_flight.pending[0].changes if in_flight.pending else None
        message, after = self.message(params, model_state, key, batch, shards, room)
        check_room(message, in_flight)
        return message, Kept(after, rng, state.step + 1)

    def exchange(
        self,
        state: SharedState,
        message: Message,
        arrived: jax.Array,
        behind: Sequence[jax.Array],
        all_reduce: AllReduce,
    ) -> Exchange:
        """Returns the exchange that sums a message over devices.

        Args:
          state: State before the update, which the sum does not depend on.
          message: The message of this device.
          arrived: Whether the message is real.
          behind: For each message that will be in flight after the update, whether it
            is real. The sum does not depend on it.
          all_reduce: The algorithm that sums messages.
        """
        del state, behind
        return averaging(message, arrived, all_reduce, self.axis_name)

    def spread(self, learned: Any, all_reduce: AllReduce) -> Any:
        """Returns `None`, because every device has all parameters."""
        del learned, all_reduce

    def update(
        self,
        state: SharedState,
        kept: Kept | None,
        reduced: Reduced,
    ) -> tuple[SharedState, StepInfo]:
        """Applies the mean that is due, if it has arrived and is finite.

        Args:
          state: State before the update.
          kept: What `compute` left. `None` in a drain, which computes nothing.
          reduced: The messages that are due, summed over devices.

        Returns:
          The state after the update, and what the step reports.
        """
        after = state.model_state
        if kept is not None:
            after = kept.model_state
            state = state._replace(rng=kept.rng, step=kept.step)
        state = state.with_learned(reduced.updated)
        devices = lax.axis_size(self.axis_name)
        return self._applied(state, reduced, after, devices=devices, alike=True)

    def point(self, state: SharedState, in_flight: InFlight) -> Any:
        """Returns the parameters at which this device takes its gradient."""
        if not self.weight_prediction or not in_flight.pending:
            return state.params
        # Without the barrier, XLA computes what the prediction and the update have in
        # common only once, and keeps it beside the parameters and the optimizer state:
        # for a ResNet-18 on GPUs, one and a half copies of the parameters. The barrier
        # leaves out the step counter. With it, the all-reduce would wait for the
        # barrier.
        held = lax.optimization_barrier((state.params, state.opt_state, state.mean))
        params, opt_state, mean = held
        if mean is None:
            held_state = state._replace(params=params, opt_state=opt_state)
            return self.ahead(held_state, in_flight)
        kind = self.kind(params, len(in_flight.pending), self._devices)
        assert kind is not None  # because something needs the mean
        own = self.own(params, in_flight)
        found = predicted(kind, self.optimizer, params, opt_state, mean, own)
        return constrained(found, state.shards.params)

    def ahead(self, state: SharedState, in_flight: InFlight) -> Any:
        """Returns the parameters to which this device's own messages in flight lead.

        They are applied in their order, in place of the means over devices. If updates
        are linear and all devices have the same weight, the mean of the results over
        devices is exact. How far they may lie apart depends on the learning rate
        (`pj.stability`). `deviation_feedback` damps this.
        """
        state = state._replace(mean=None)
        queue = zip(self._expected(in_flight), arrivals(in_flight), strict=True)
        for own, arrived in queue:
            reduced = Reduced.of(own, arrived)
            if self.weight_prediction == "linearized" and self._devices > 1:
                reduced = self._or_zeros(reduced)
            state, _ = self._applied(
                state, reduced, state.model_state, devices=1, alike=False
            )
        return state.params

    def _or_zeros(self, own: Reduced) -> Reduced:
        """Returns a message with gradients of zero in place of what is not usable.

        The mean in flight may be usable all the same, and moments move with it.
        """
        usable = own.usable
        gradients, passengers = own.sum.gradients, own.sum.passengers
        zeros = jax.tree.map(jnp.zeros_like, gradients)
        if passengers.weighted:
            weight = jnp.where(usable, passengers.weight, 1)
            values = passengers.values.at[1].set(weight)
            passengers = dataclasses.replace(passengers, values=values)
        message = own.sum._replace(
            gradients=select(usable, gradients, zeros), passengers=passengers
        )
        return own._replace(sum=message, finite=jnp.array(True))

    def own(self, params: Any, in_flight: InFlight) -> list[Own]:
        """Returns this device's gradients in flight, oldest first.

        Args:
          params: The whole parameters, or their shapes.
          in_flight: This device's messages in flight.
        """

        def one(message: Message, arrived: jax.Array) -> Own:
            # Also where the optimizer is to deal with NaN: P times NaN is NaN.
            usable = Reduced.of(message, arrived).usable
            gradients = mean_as(message.gradients, params, message, 1)
            zeros = jax.tree.map(jnp.zeros_like, gradients)
            return Own(
                gradients=select(usable, gradients, zeros),
                loss=mean(message.passengers.loss, message, 1),
                real=arrived,
                usable=usable,
            )

        return list(map(one, in_flight.pending, arrivals(in_flight)))

    def deviation(self, in_flight: InFlight, reduced: Reduced) -> Any:
        """Returns this device's gradients of the message that is due, minus the mean.

        The deviation is zero if the reduced message is not usable. It is `None` unless
        deviations are fed back.

        Args:
          in_flight: This device's messages in flight, before the oldest is taken off.
          reduced: The oldest messages, summed over devices.
        """
        if in_flight.deviation is None:
            return None
        own, total = in_flight.pending[0], reduced.sum
        usable, devices = reduced.usable, lax.axis_size(self.axis_name)
        deviation = jax.tree.map(
            lambda o, t: jnp.where(
                usable, mean(o, own, 1) - mean(t, total, devices), 0
            ).astype(o.dtype),
            own.gradients,
            total.gradients,
        )
        return constrained(deviation, own.shards.params)

    def message(
        self,
        params: Any,
        model_state: Any,
        key: Any,
        batch: Batch,
        shards: Shards,
        room: Any = None,
    ) -> tuple[Message, Any]:
        """Returns this device's message, and the model state as its loss left it."""
        return local_message(
            self.loss_fn,
            params,
            model_state,
            batch,
            key,
            axis_name=self.axis_name,
            microbatches=self.microbatches,
            compute_dtype=self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            shards=shards,
            room=room,
        )

    def _expected(self, in_flight: InFlight) -> tuple[Message, ...]:
        """Returns the messages in flight, the oldest with a share of the deviation."""
        if in_flight.deviation is None:
            return in_flight.pending
        oldest, *newer = in_flight.pending
        weight = oldest.weight

        def add(own: jax.Array, deviation: jax.Array) -> jax.Array:
            share: Any = self.deviation_feedback
            if weight is not None:  # gradients in flight are multiplied by it
                share *= weight.astype(own.dtype)
            return own + share * deviation

        gradients = jax.tree.map(add, oldest.gradients, in_flight.deviation)
        return oldest._replace(gradients=gradients), *newer

    def _applied(
        self,
        state: SharedState,
        reduced: Reduced,
        after: Any,
        *,
        devices: int,
        alike: bool,
    ) -> tuple[SharedState, StepInfo]:
        """Applies a reduced message with the settings of this step.

        Args:
          state: State before the update.
          reduced: The messages, summed over devices.
          after: Model state as this device's loss left it.
          devices: Number of devices over which the messages were summed.
          alike: Whether all devices apply the same sum. Otherwise, each device applies
            its own message, in a prediction.
        """

        def advance(message: Message) -> tuple[Any, Any, Any]:
            learned = state.params, state.opt_state, state.mean
            if message.gradients is None:  # the exchange has updated them
                return learned
            return advanced(self.tx, *learned, message, devices)

        # A collective in a branch would wait in vain for devices in the other branch.
        return apply_reduced(
            state,
            reduced,
            after,
            advance,
            devices=devices,
            branches=self.platform == "cpu"
            and (alike or not collective_axes(lambda: advance(reduced.sum))),
            skip_nonfinite=self.skip_nonfinite,
        )

    def _wants_mean(self, state: SharedState, in_flight: InFlight) -> bool | None:
        """Returns whether a state must have a mean; `None` if it may have one."""
        count = len(in_flight.pending)
        if not count:
            return None
        given = whole_params(state), count, self._devices, state.shards
        return jax.eval_shape(lambda: self.empty_mean(*given)) is not None

    @property
    def _devices(self) -> int:
        """Returns the number of devices, or groups, inside the program of a step."""
        return lax.axis_size(self.axis_name)

    def _split_rng(self, rng: Any) -> tuple[Any, Any]:
        """Returns the keys for the next step, and this device's keys for this step."""
        if rng is None:
            return None, None
        keys, structure = jax.tree.flatten(rng)
        pairs = [tuple(jax.random.split(key)) for key in keys]
        place, following = lax.axis_index(self.axis_name), [key for key, _ in pairs]
        own = [jax.random.fold_in(key, place) for _, key in pairs]
        unflatten = functools.partial(jax.tree.unflatten, structure)
        return unflatten(following), unflatten(own)

"""Runs one device's part of a step, before and after the sum over devices.

1. `compute` makes the message of this batch. The gradient is taken at the device's
   prediction, or at the parameters as they are, and always at the model state to which
   the device's changes in flight lead.
2. `update` applies the mean of the messages that are due.

The exchange comes between them. If the width is above 1, it sums messages of an earlier
step and needs nothing that `compute` returns, so an executor can run it beside the
compute.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pipejax.collectives import AllReduce
from pipejax.executors import collective_axes
from pipejax.mesh import AxisName
from pipejax.message import (
    Exchange,
    InFlight,
    Message,
    Reduced,
    arrivals,
    averaging,
    mean,
)
from pipejax.shards import Shards, constrained

from ._check_inner import warn_of_unused_axes
from ._check_input import check_keywords
from ._check_state import check_pending, check_room
from ._feed import Batch
from ._gradient import local_message
from ._info import StepInfo
from ._loss import Loss
from ._model_state import model_state_ahead
from ._state import Kept, SharedState, whole_params
from ._update import advanced, apply_reduced


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
    weight_prediction: bool
    deviation_feedback: float
    skip_nonfinite: bool

    @property
    def shard_optimizer(self) -> bool:
        """Returns whether each device keeps only pieces of the optimizer."""
        return False

    def check_pieces(self, params: Any, message: Message, mesh: Mesh) -> None:
        """Raises a `ValueError` unless devices can update their pieces by themselves.

        Args:
          params: Shapes of the whole parameters.
          message: A message, or its shapes.
          mesh: The mesh of the train step.
        """

    def in_pieces(
        self, state: SharedState, specs: Any, *, predicts: bool
    ) -> SharedState:
        """Returns a whole state as this device keeps it.

        Args:
          state: A state with whole parameters and optimizer state.
          specs: The partition specs of its leaves over the axes of the data.
          predicts: Whether gradients will be taken at predictions.
        """
        del specs, predicts
        return state

    def compute(
        self, state: SharedState, in_flight: InFlight, batch: Batch
    ) -> tuple[Message, Kept]:
        """Returns this device's message, and what the update will need.

        Raises:
          ValueError: If the messages in flight do not fit the parameters, the model
            state or the metrics, or if the loss function breaks its contract.
        """
        check_pending(state, in_flight, self.reduce_dtype)
        given = {"model_state": state.model_state, "rng": state.rng}
        check_keywords(self.loss_fn, **given)
        rng, key = self._split_rng(state.rng)
        if state.shards:
            args = whole_params(state), state.model_state, key, batch, state.shards
            warn_of_unused_axes(self.loss_fn, *args)
        params = self.point(state, in_flight).params
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

    def point(self, state: SharedState, in_flight: InFlight) -> SharedState:
        """Returns the state at whose parameters this device takes its gradient."""
        return self.predicted(state, in_flight) if self.weight_prediction else state

    def predicted(self, state: SharedState, in_flight: InFlight) -> SharedState:
        """Returns this device's prediction: the state after its messages in flight.

        Messages in flight are applied in their order. This device's own gradients stand
        in for the means over devices, which have not arrived yet. The prediction is
        used in this step only, and is not sent to other devices. The next step begins
        from the true means again, so errors of the prediction do not add up. However, a
        gradient that is taken far from where other devices take theirs differs more
        from the mean, and so does the next prediction. `deviation_feedback` damps this.

        If updates are linear and all devices have the same weight, the mean of the
        predictions is exact. How far the predictions may lie apart depends on the
        learning rate (`pj.stability`). `pj.corrections.extrapolate_updates` predicts
        from the optimizer's momentum alone.
        """
        # Without the barrier, XLA computes what the prediction and the update have in
        # common only once, and keeps it beside the parameters and the optimizer state:
        # for a ResNet-18 on GPUs, one and a half copies of the parameters. The barrier
        # leaves out the step counter. With it, the all-reduce would wait for the
        # barrier.
        held = lax.optimization_barrier((state.params, state.opt_state))
        state = state._replace(params=held[0], opt_state=held[1])
        return self.ahead(state, in_flight)

    def ahead(self, state: SharedState, in_flight: InFlight) -> SharedState:
        """Returns a state after this device's messages in flight, in their order."""
        queue = zip(self._expected(in_flight), arrivals(in_flight), strict=True)
        for own, arrived in queue:
            state, _ = self._applied(
                state,
                Reduced.of(own, arrived),
                state.model_state,
                devices=1,
                alike=False,
            )
        return state

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

        def advance(message: Message) -> tuple[Any, Any]:
            if message.gradients is None:  # the exchange has updated both
                return state.params, state.opt_state
            return advanced(self.tx, state.params, state.opt_state, message, devices)

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

"""One device's part of a step, in two halves.

1. compute: gradient, loss, metrics and change of model state of this batch, as buckets,
   at the parameters as they are, or where this device expects them to be
2. update: the mean of the buckets that are due, applied

Between them stands the sum over devices, which needs neither: who runs it, and beside
what, is the executor's business.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from pipejax import buckets
from pipejax.buckets import Buckets, Form
from pipejax.collectives import Layout
from pipejax.mesh import AxisName
from pipejax.message import MessageForm
from pipejax.pipeline import PipelinedMeanState, arrivals

from ._check_input import check_lengths, check_room
from ._gradient import Loss, empty_message, local_message
from ._state import Carry, Kept, Message, StepInfo
from ._update import apply_message


@dataclasses.dataclass(frozen=True, eq=False)
class Halves:
    """A loss and an optimizer as the two halves of a step, inside `shard_map`."""

    loss_fn: Loss
    tx: optax.GradientTransformation
    microbatches: int
    compute_dtype: DTypeLike | None
    reduce_dtype: DTypeLike | None
    axis_name: AxisName
    weight_prediction: bool
    deviation_feedback: float

    def compute(
        self, carry: Carry, in_flight: PipelinedMeanState, batch: Any
    ) -> tuple[Buckets, Kept]:
        """This device's buckets, and what `update` will need."""
        rng, key = self._split_rng(carry.rng)
        at = self.predicted(carry, in_flight) if self.weight_prediction else carry
        message, after = self.message(at.params, at.model_state, key, batch)
        fresh = buckets.flatten(message, self.reduce_dtype)
        return fresh, Kept(after, rng, carry.step + 1, Form.of(message))

    def update(
        self, carry: Carry, kept: Kept, total: Buckets, arrived: jax.Array
    ) -> tuple[Carry, StepInfo]:
        """Applies the mean that is due, if it has `arrived` and is finite."""
        carry = carry._replace(rng=kept.rng, step=kept.step)
        devices = lax.axis_size(self.axis_name)
        return self._applied(carry, kept, total, devices, arrived)

    def predicted(self, carry: Carry, in_flight: PipelinedMeanState) -> Carry:
        """The carry as it will be, as far as this device can know.

        What is in flight is applied in its order, this device's own gradients in place
        of the means, which are not there yet. Nobody else learns of it: the next step
        begins from the means again, so what was guessed wrong does not add up. But a
        gradient taken far from where the others take theirs differs from the mean the
        more, and the next prediction with it: `deviation_feedback` damps that.

        Of the devices' guesses the mean is exact where updates are linear; how far they
        may lie apart is a matter of the learning rate (`pj.stability`). For predictions
        from the optimizer's momentum alone see `pj.corrections.extrapolate_updates`.
        """
        queue = zip(self._expected(in_flight), arrivals(in_flight), strict=True)
        for own, arrived in queue:
            carry, _ = self._applied(carry, self.idle(carry), own, 1, arrived)
        return carry

    def deviation(
        self, in_flight: PipelinedMeanState, total: Buckets, applied: jax.Array
    ) -> Buckets:
        """What the oldest in flight differs from its mean by, once `total` is there.

        Of what was not applied nothing; empty unless it is fed back.
        """
        if not in_flight.deviation:
            return {}
        devices = lax.axis_size(self.axis_name)
        return {
            name: jnp.where(applied, own - total[name] / devices, 0)
            for name, own in in_flight.pending[0].items()
        }

    def idle(self, carry: Carry) -> Kept:
        """What `update` needs where no batch was computed: while draining."""
        form = Form.of(jax.eval_shape(empty_message, carry.params, carry.model_state))
        return Kept(carry.model_state, carry.rng, carry.step, form)

    def check_state(self, carry: Carry, in_flight: PipelinedMeanState) -> None:
        """A ValueError unless the pipeline is one for these parameters."""
        check_lengths(in_flight, buckets.sizes(carry.params, self.reduce_dtype))

    def check_message(self, kept: Kept, in_flight: PipelinedMeanState) -> None:
        """A ValueError unless what was computed has its place in the pipeline."""
        check_room(kept.form.tree, in_flight, self.reduce_dtype)

    def message_form(self, carry: Carry, lengths: dict[str, int]) -> MessageForm:
        """Gradients first, then passengers, which stay exact: model state, metrics."""
        gradients = buckets.sizes(carry.params, self.reduce_dtype)
        shapes = buckets.shapes(carry.params, self.reduce_dtype)
        layouts = {
            name: Layout(gradients[name], name, n - gradients[name], shapes[name])
            for name, n in lengths.items()
        }
        message = jax.eval_shape(empty_message, carry.params, carry.model_state)
        checked = message.gradients, message.model_state
        sizes = buckets.sizes(checked, self.reduce_dtype)
        return MessageForm(tuple(layouts.items()), tuple(sizes.items()))

    def message(
        self, params: Any, model_state: Any, key: Any, batch: Any
    ) -> tuple[Message, Any]:
        """What this device has to send, and the model state as its loss left it."""
        return local_message(
            self.loss_fn,
            params,
            model_state,
            batch,
            key,
            microbatches=self.microbatches,
            compute_dtype=self.compute_dtype,
        )

    def _expected(self, in_flight: PipelinedMeanState) -> tuple[Buckets, ...]:
        """What to apply for what is in flight: the device's own, fed back."""
        if not in_flight.deviation:
            return in_flight.pending
        oldest, *newer = in_flight.pending
        oldest = {
            name: own + self.deviation_feedback * in_flight.deviation[name]
            for name, own in oldest.items()
        }
        return oldest, *newer

    def _applied(
        self, carry: Carry, kept: Kept, total: Buckets, devices: int, arrived: jax.Array
    ) -> tuple[Carry, StepInfo]:
        """`total`, a sum over so many devices, applied."""
        return apply_message(
            self.tx,
            carry,
            total,
            kept.form.tree,
            kept.model_state,
            arrived,
            devices=devices,
            reduce_dtype=self.reduce_dtype,
        )

    def _split_rng(self, rng: Any) -> tuple[Any, Any]:
        """The key to carry on, and this device's own for this step."""
        if rng is None:
            return None, None
        rng, key = jax.random.split(rng)
        return rng, jax.random.fold_in(key, lax.axis_index(self.axis_name))

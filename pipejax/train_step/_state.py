"""What a train step carries, and what it reports."""

from typing import Any, NamedTuple

import jax
import optax

from pipejax.buckets import Form
from pipejax.pipeline import PipelinedMeanState


class PipelineState(NamedTuple):
    """Everything a run needs to go on, as one pytree.

    Attributes:
      params: parameters, replicated.
      opt_state: state of the Optax transformation, replicated.
      model_state: state of the model that is not trained (batch-norm statistics),
        replicated; `None` if there is none.
      in_flight: gradients computed and not yet applied, with the metrics and changes of
        model state that travel with them.
      rng: PRNG key from which each step splits its own; `None` if there is none.
      skipped: int32, updates skipped so far because a reduced gradient was not finite.
      step: int32, calls of `train.step` so far.
      calls: the same as `step`, on the host, where which program runs depends on it, so
        that nobody waits for a device to know; `None` where it does not.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    in_flight: PipelinedMeanState
    rng: jax.Array | None
    skipped: jax.Array
    step: jax.Array
    calls: Any


class Carry(NamedTuple):
    """The part of a `PipelineState` that a step's two halves read and write.

    All of it is replicated, and may be overwritten by the step that is given it. The
    gradients in flight may not: they may still be being sent.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    rng: jax.Array | None
    skipped: jax.Array
    step: jax.Array

    @classmethod
    def of(cls, state: "PipelineState | Carry") -> "Carry":
        """The carry of `state`."""
        return cls(*(getattr(state, name) for name in cls._fields))

    def joined(self, in_flight: PipelinedMeanState, calls: Any) -> PipelineState:
        """The state with this carry."""
        return PipelineState(**self._asdict(), in_flight=in_flight, calls=calls)


class Kept(NamedTuple):
    """What the first half of a step leaves for the second.

    Attributes:
      model_state: as this device's loss left it.
      rng: the key to carry on.
      step: the count to carry on.
      form: of the message that was sent.
    """

    model_state: Any
    rng: jax.Array | None
    step: jax.Array
    form: Form


class StepInfo(NamedTuple):
    """What one step reports. It travelled with the gradients, and lags as they do.

    Attributes:
      loss: mean loss over the global batch of `width - 1` steps ago, where gradients of
        it were taken; NaN while nothing has arrived.
      metrics: the same mean of the metrics that the loss function returned.
      applied: bool, whether this step changed the parameters.
      skipped: int32, updates skipped so far because a reduced gradient was not finite.
    """

    loss: jax.Array
    metrics: Any
    applied: jax.Array
    skipped: jax.Array


class Aux(NamedTuple):
    """What a loss function may return beside its loss: `return loss, Aux(...)`.

    Attributes:
      metrics: pytree of real numbers or arrays, averaged over microbatches and devices.
      model_state: the model state after this batch, as `train.init` was given it.
    """

    metrics: Any = None
    model_state: Any = None


class Message(NamedTuple):
    """What one device sends each step, in one bucket per dtype.

    Attributes:
      gradients: as the parameters.
      model_state: change of the floating leaves of the model state; `None` for others.
      loss: scalar.
      metrics: as the loss function returned them.
    """

    gradients: Any
    model_state: Any
    loss: jax.Array
    metrics: Any

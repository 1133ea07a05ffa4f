"""What a train step carries, and what it reports."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from ._pipeline import PipelinedMeanState, in_flight_specs


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
      warmup_left: synchronous steps still to come; `None` where there never were any.
        Lives on the host, so that the program to run is known without waiting for a
        device.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    in_flight: PipelinedMeanState
    rng: jax.Array | None
    skipped: jax.Array
    step: jax.Array
    warmup_left: Any


class StepInfo(NamedTuple):
    """What one step reports. It travelled with the gradients, and lags as they do.

    Attributes:
      loss: mean loss over the global batch of `width - 1` steps ago; NaN while nothing
        has arrived.
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


def pipeline_specs(axis_name: str) -> PipelineState:
    """Partition specs of the state a program carries: one row of `pending` a device."""
    specs: dict[str, Any] = dict.fromkeys(PipelineState._fields, P())
    specs["in_flight"] = in_flight_specs(axis_name)
    return PipelineState(**specs | {"warmup_left": None})

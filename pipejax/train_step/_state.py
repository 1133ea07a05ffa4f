"""What a train step carries from one step to the next."""

from typing import Any, NamedTuple

import jax
import optax

from pipejax.message import InFlight


class PipelineState(NamedTuple):
    """Everything a run needs to go on, as one pytree.

    Attributes:
      params: parameters, replicated.
      opt_state: state of the Optax transformation, replicated.
      model_state: state of the model that is not trained (batch-norm statistics),
        replicated; `None` if there is none.
      in_flight: messages computed and not yet applied: gradients, with the metrics and
        changes of model state that travel with them.
      rng: PRNG key from which each step splits its own; `None` if there is none.
      skipped: int32, updates skipped so far because a reduced gradient was not finite.
      step: int32, calls of `train.step` so far.
      calls: calls of `train.step` so far, on the host, where the next program depends
        on it (warm-up, schedules), or where the first step is to look at a model state
        that is not finite; else `None`.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    in_flight: InFlight
    rng: jax.Array | None
    skipped: jax.Array
    step: jax.Array
    calls: Any


class ReplicatedState(NamedTuple):
    """The part of a `PipelineState` that all devices share.

    A step that is given it may overwrite it. Gradients in flight may not be
    overwritten: they may still be being sent.
    """

    params: optax.Params
    opt_state: optax.OptState
    model_state: Any
    rng: jax.Array | None
    skipped: jax.Array
    step: jax.Array

    @classmethod
    def of(cls, state: PipelineState) -> "ReplicatedState":
        """Returns the replicated part of `state`."""
        return cls(*(getattr(state, name) for name in cls._fields))

    def with_in_flight(self, in_flight: InFlight, calls: Any) -> PipelineState:
        """Returns the whole state."""
        return PipelineState(**self._asdict(), in_flight=in_flight, calls=calls)


class Kept(NamedTuple):
    """What computing a message leaves for the update of the same step.

    Attributes:
      model_state: the model state as this device's loss left it.
      rng: the key to carry on.
      step: the count to carry on.
    """

    model_state: Any
    rng: jax.Array | None
    step: jax.Array


class Aux(NamedTuple):
    """What a loss function may return beside its loss: `return loss, Aux(...)`.

    Attributes:
      metrics: pytree of real scalars, averaged over microbatches and devices.
      model_state: the model state after this batch, as `train.init` was given it.
      weight: nonnegative scalar W, the number of tokens or examples over which the loss
        is a mean; it must not depend on the parameters. Gradients, loss and metrics are
        then averaged by weight, `sum_i W_i g_i / sum_i W_i` over microbatches and
        devices; a part of weight 0 contributes nothing. `None` weighs all parts alike.
    """

    metrics: Any = None
    model_state: Any = None
    weight: Any = None

"""A client: a loss, an optimizer and batches, which both contenders are given."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

Loss = Callable[..., Any]


class Extra(NamedTuple):
    """What a loss function returns beside its loss: `return loss, Extra(...)`.

    Attributes:
      metrics: pytree of scalars.
      model_state: the model state after this batch; `None` without any.
      weight: scalar, the sum of the weights of the loss; `None` for an ordinary mean.
    """

    metrics: Any = None
    model_state: Any = None
    weight: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Client:
    """One training run, in plain JAX and Optax.

    A loss function is called as `loss(params, batch, model_state=..., rng=...)`, with
    those keywords alone that are not `None` here, and returns `loss, Extra(...)`.
    """

    loss: Loss
    """Loss of one device's share of a batch."""
    tx: optax.GradientTransformation
    """The optimizer."""
    params: Any
    """At the start."""
    batches: Sequence[Any]
    """One global batch for every step."""
    terms: int
    """The largest number of terms in a sum that the loss or its gradient takes."""
    model_state: Any = None
    """At the start."""
    rng: jax.Array | None = None
    """Key, from which every device gets one for every step."""
    whole: Loss | None = None
    """The loss of a global batch on one device, if that is what devices share out."""
    takes_value: bool = False
    """Whether the optimizer's update takes the loss as `value`."""
    nnx: tuple[Any, Loss] | None = None
    """The NNX model and its `loss(model, batch)`, for pipejax's adapter to split."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `pj.make_train_step`."""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    """A part of what pipejax says, by the way of training that it refuses."""

    @property
    def microbatches(self) -> int:
        """In how many parts a device takes its share."""
        return self.settings.get("microbatches", 1)

"""A client: a loss, an optimizer and batches, for pipejax and for the twin."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

Loss = Callable[..., Any]


class Extra(NamedTuple):
    """The second output of a loss function: `return loss, Extra(...)`.

    Attributes:
      metrics: A pytree of scalars.
      model_state: The model state after this batch, or `None` if there is none.
      weight: A scalar, the sum of the weights in the loss; `None` for an ordinary mean.
    """

    metrics: Any = None
    model_state: Any = None
    weight: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Client:
    """One training run, in plain JAX and Optax.

    A loss function is called as `loss(params, batch, model_state=..., rng=...)` and
    returns `loss, Extra(...)`. A keyword is left out if the client has `None` for it.
    """

    loss: Loss
    """The loss of one device's share of a batch."""
    tx: optax.GradientTransformation
    """The optimizer."""
    params: Any
    """The parameters at the start."""
    batches: Sequence[Any]
    """The global batch of every step."""
    terms: int
    """The number of terms in the longest sum of the loss or its gradient."""
    model_state: Any = None
    """The model state at the start."""
    rng: jax.Array | None = None
    """The key from which every device gets a key of its own in every step."""
    whole: Loss | None = None
    """The loss of a global batch on one device; `None` averages over four shares."""
    takes_value: bool = False
    """`True` if the update of the optimizer takes the loss as `value`."""
    nnx: tuple[Any, Loss] | None = None
    """An NNX model and its `loss(model, batch)`, which pipejax's adapter splits."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `pj.make_train_step`."""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    """A part of the error message, for every way of training that pipejax refuses."""

    @property
    def microbatches(self) -> int:
        """Returns the number of parts in which a device takes its share of a batch."""
        return self.settings.get("microbatches", 1)

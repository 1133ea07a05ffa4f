"""A client: a loss, an optimizer and batches, for pipejax and for the twin.

A program trains one client, or several clients that take turns.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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

    A loss function is called as `loss(params, batch, model_state=..., rng=...,
    shared=...)` and returns `loss, Extra(...)`. A keyword is left out if the client has
    `None` for it.
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
    shared: Any = None
    """The input that all devices share in the first step."""
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


class Trainer(Protocol):
    """A client in training, by pipejax or by its twin."""

    @property
    def params(self) -> Any:
        """Returns the parameters after the last step."""

    def step(self, batch: Any, shared: Any = None) -> None:
        """Trains on a batch, with an input that all devices share."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A training loop that may read the parameters of its clients between steps."""

    clients: tuple[Client, ...]
    """The clients, each with a train step of its own."""
    loop: Callable[..., None]
    """Takes a `Trainer` for each client, in order, and calls all of their steps."""

    @property
    def refused(self) -> dict[str, str]:
        """Returns a part of the error message for every way that pipejax refuses."""
        return {
            way: said for each in self.clients for way, said in each.refused.items()
        }


def program_of(client: Client | Program) -> Program:
    """Returns the program that trains a client on its batches, one after the other."""
    if isinstance(client, Program):
        return client

    def loop(trainer: Trainer) -> None:
        for batch in client.batches:
            trainer.step(batch, client.shared)

    return Program((client,), loop)

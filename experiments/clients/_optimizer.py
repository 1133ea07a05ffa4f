"""An optimizer of the comparison, and the optimizers that wrappers wrap."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An Optax optimizer, and the settings of a loop that trains with it."""

    make: Callable[[], Any]
    """Returns the gradient transformation."""
    takes_value: bool = False
    """`True` if the update of the optimizer takes the loss as `value`."""
    batches: Callable[[list[Any]], list[Any]] = list
    """Makes the batches of this optimizer from those of all other optimizers."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `pj.make_train_step`."""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    """A part of the error message, for every way of training that pipejax refuses."""


def sgd() -> optax.GradientTransformation:
    """Returns SGD with momentum."""
    return optax.sgd(0.05, momentum=0.9)


def adam() -> optax.GradientTransformation:
    """Returns Adam."""
    return optax.adam(0.02)


def plateau() -> optax.GradientTransformation:
    """Returns Adam with a learning rate that is halved when the loss stops falling."""
    scale = contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=2)
    return optax.chain(adam(), scale)

"""An optimizer of the conformance run, and those that others wrap."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An Optax configuration, and what a loop with it needs."""

    make: Callable[[], Any]
    """Returns the transformation."""
    takes_value: bool = False
    """Whether a loop gives it the loss."""
    batches: Callable[[list[Any]], list[Any]] = list
    """Makes its batches from those of the others."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `pj.make_train_step`."""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    """What pipejax says, by the way of training that it refuses."""


def sgd() -> optax.GradientTransformation:
    """Returns SGD with momentum."""
    return optax.sgd(0.05, momentum=0.9)


def adam() -> optax.GradientTransformation:
    """Returns Adam."""
    return optax.adam(0.02)


def plateau() -> optax.GradientTransformation:
    """Returns Adam with a rate that falls where the loss does not."""
    scale = contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=2)
    return optax.chain(adam(), scale)

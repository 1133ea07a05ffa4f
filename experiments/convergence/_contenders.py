"""Optimizers as a user would have tuned them, and what there is against a delay."""

import dataclasses
import functools
from collections.abc import Callable

import optax

from pipejax import corrections


def octaves(least: float, count: int) -> tuple[float, ...]:
    """Each twice the one before."""
    return tuple(least * 2**i for i in range(count))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer but for its learning rate."""

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    """From a learning rate."""
    momentum: float
    """Decay of its average of gradients."""
    rates: tuple[float, ...]
    """The sweep."""


OPTIMIZERS = {
    "momentum": Optimizer(
        functools.partial(optax.sgd, momentum=0.9), 0.9, octaves(0.0125, 7)
    ),
    "adamw": Optimizer(optax.adamw, 0.9, octaves(0.0005, 5)),
    # Updates as large as AdamW's (Liu et al. 2025, https://arxiv.org/abs/2502.16982).
    "muon": Optimizer(
        functools.partial(optax.contrib.muon, consistent_rms=0.2),
        0.95,
        octaves(0.0005, 6),
    ),
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A pipeline of some width, and how its delay is corrected."""

    width: int
    """Of the pipeline."""
    weight_prediction: bool = False
    """Of `pj.make_train_step`."""
    deviation_feedback: float = 0.0
    """Likewise."""
    before: optax.GradientTransformation | None = None
    """What the gradient goes through first."""
    after: Callable[[float], optax.GradientTransformation] | None = None
    """From the optimizer's momentum to what its update goes through."""
    extrapolates: bool = False
    """Whether `after` leaves the parameters ahead of those to be tested."""

    def corrected(
        self,
        optimizer: Optimizer,
        rate: optax.Schedule,
        clip: optax.GradientTransformation,
    ) -> optax.GradientTransformation:
        """The optimizer with its correction, and with clipping as a part of it."""
        after = self.after and self.after(optimizer.momentum)
        parts = (self.before, clip, optimizer.make(rate), after)
        return optax.chain(*(part for part in parts if part is not None))


def methods_of(width: int) -> dict[str, Method]:
    """What is compared at any width."""
    return {
        ", plain": Method(width),
        ", predicted": Method(width, weight_prediction=True),
        ", last update": Method(
            width,
            after=lambda _: corrections.extrapolate_updates(width - 1),
            extrapolates=True,
        ),
        ", robust": Method(
            width, after=lambda momentum: corrections.delay_robust(momentum, width)
        ),
    }


METHODS = {
    "K=1": Method(1),
    **{f"K=2{name}": method for name, method in methods_of(2).items()},
    "K=2, fed back": Method(2, weight_prediction=True, deviation_feedback=0.5),
    "K=2, average": Method(2, before=corrections.average_gradients(2)),
    "K=2, scaled": Method(2, after=lambda _: corrections.scale_by_staleness(2)),
    "K=2, DC-ASGD": Method(2, before=corrections.delay_compensation(2)),
    **{f"K=3{name}": method for name, method in methods_of(3).items()},
}
# At twice the tuned rate: plain, the default, and what is to hold at large rates.
TWICE = (
    "K=1",
    "K=2, plain",
    "K=2, predicted",
    "K=2, robust",
    "K=2, fed back",
    "K=3, plain",
    "K=3, predicted",
    "K=3, robust",
)

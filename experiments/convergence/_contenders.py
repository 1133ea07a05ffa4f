"""The optimizers, as a user would tune them, and the methods against a delay."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import optax

from experiments.corrections import average_gradients, delay_compensation
from pipejax import codecs, transforms


def octaves(least: float, count: int) -> tuple[float, ...]:
    """Returns `count` numbers from `least` up, each twice the number before."""
    return tuple(least * 2**i for i in range(count))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer, without its learning rate."""

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    """Makes the optimizer from a learning rate."""
    momentum: float
    """The decay of the optimizer's average of gradients."""
    rates: tuple[float, ...]
    """The learning rates of the sweep."""


OPTIMIZERS = {
    "momentum": Optimizer(
        functools.partial(optax.sgd, momentum=0.9), 0.9, octaves(0.0125, 7)
    ),
    "adamw": Optimizer(optax.adamw, 0.9, octaves(0.0005, 5)),
    # The updates are as large as AdamW's (Liu et al. 2025,
    # https://arxiv.org/abs/2502.16982).
    "muon": Optimizer(
        functools.partial(optax.contrib.muon, consistent_rms=0.2),
        0.95,
        octaves(0.0005, 6),
    ),
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A pipeline of some width, and the correction of its delay."""

    width: int
    """The width of the pipeline."""
    weight_prediction: Literal["linearized", "own"] | bool = False
    """The argument `weight_prediction` of `pj.make_train_step`."""
    shard_optimizer: bool = False
    """The argument `shard_optimizer` of `pj.make_train_step`."""
    gather_codec: codecs.Codec | None = None
    """The argument `gather_codec` of `pj.make_train_step`."""
    before: optax.GradientTransformation | None = None
    """The transformation of the gradient, before the optimizer."""
    after: Callable[[float], optax.GradientTransformation] | None = None
    """Makes the transformation of the update from the optimizer's momentum."""
    extrapolates: bool = False
    """`True` if `after` keeps the parameters ahead of those that are tested."""

    def corrected(
        self,
        optimizer: Optimizer,
        rate: optax.Schedule,
        clip: optax.GradientTransformation,
    ) -> optax.GradientTransformation:
        """Returns the optimizer with clipping and the correction of this method."""
        after = self.after and self.after(optimizer.momentum)
        parts = (self.before, clip, optimizer.make(rate), after)
        return optax.chain(*(part for part in parts if part is not None))


def methods_of(width: int) -> dict[str, Method]:
    """Returns the methods that are compared at every width, without `K=...`."""
    return {
        ", plain": Method(width),
        ", predicted": Method(width, weight_prediction="own"),
        ", last update": Method(
            width,
            after=lambda _: transforms.extrapolate_updates(width - 1),
            extrapolates=True,
        ),
        ", robust": Method(
            width, after=lambda momentum: transforms.delay_robust(momentum, width)
        ),
    }


METHODS = {
    "K=1": Method(1),
    **{f"K=2{name}": method for name, method in methods_of(2).items()},
    "K=2, average": Method(2, before=average_gradients(2)),
    # Updates are divided by the width (Zhang et al. 2016,
    # https://arxiv.org/abs/1511.05950).
    "K=2, scaled": Method(2, after=lambda _: optax.scale(1 / 2)),
    "K=2, DC-ASGD": Method(2, before=delay_compensation(2)),
    **{f"K=3{name}": method for name, method in methods_of(3).items()},
}
# The methods that also run at twice the tuned rate: a plain delay, the default, and
# those that should work at large rates.
TWICE = (
    "K=1",
    "K=2, plain",
    "K=2, predicted",
    "K=2, robust",
    "K=3, plain",
    "K=3, predicted",
    "K=3, robust",
)

"""Draws the stable learning rates over momentum, with a panel for each optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import optax

from pipejax._internal.figures import new_figure
from pipejax.stability import max_learning_rate


class Family(Protocol):
    """Makes a linear optimizer whose updates are proportional to the learning rate.

    It takes the width because a correction for the delay needs to know it.
    """

    def __call__(
        self, learning_rate: float, momentum: float, *, width: int
    ) -> optax.GradientTransformation: ...


_MOMENTA = np.linspace(0.0, 0.99, 100)


def picture(
    families: Mapping[str, Family], widths: Sequence[int] = (1, 2, 3, 4)
) -> Any:
    """Draws the largest stable learning rate times curvature over momentum.

    There is a panel for each family, by its title, and a line for each width. All lines
    are limits under a plain delay, without weight prediction, so that the panels show
    what a correction in a family changes.
    """
    figure = new_figure(figsize=(1 + 4 * len(families), 4), layout="constrained")
    panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    for axes, (name, family) in zip(panels, families.items(), strict=True):
        for width in widths:
            axes.plot(_MOMENTA, _limits(family, width), label=f"K = {width}")
        axes.set(title=name, xlabel="momentum", yscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("largest stable learning rate x curvature")
    panels[0].legend(frameon=False)
    return figure


def _limits(family: Family, width: int) -> list[float]:
    def at(momentum: float) -> Callable[[float], optax.GradientTransformation]:
        return lambda rate: family(rate, momentum, width=width)

    return [
        max_learning_rate(at(momentum), width, weight_prediction=False)
        for momentum in _MOMENTA.tolist()
    ]

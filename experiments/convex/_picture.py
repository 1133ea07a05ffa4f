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

    There is a panel for each family, by its title, and a line for each width. Their
    lines are limits under a plain delay, so that the panels show what a correction in a
    family changes. In a panel before them is the first family with weight prediction,
    the default of a train step.
    """
    first = next(iter(families))
    drawn = {
        f"{first}, weight prediction (the default)": (families[first], True),
        f"{first}, plain delay": (families[first], False),
        **{name: (family, False) for name, family in families.items() if name != first},
    }
    figure = new_figure(figsize=(8.5, 7), layout="constrained")
    panels = figure.subplots(-(-len(drawn) // 2), 2, sharex=True, sharey=True).ravel()
    for axes, (name, (family, predicts)) in zip(panels, drawn.items(), strict=False):
        for width in widths:
            limits = _limits(family, width, weight_prediction=predicts)
            axes.plot(_MOMENTA, limits, label=f"K = {width}")
        axes.set(title=name, xlabel="momentum", yscale="log")
        axes.grid(alpha=0.3)
    for axes in panels[len(drawn) :]:
        axes.remove()
    figure.supylabel("largest stable learning rate x curvature")
    panels[0].legend(frameon=False)
    return figure


def _limits(family: Family, width: int, *, weight_prediction: bool) -> list[float]:
    def at(momentum: float) -> Callable[[float], optax.GradientTransformation]:
        return lambda rate: family(rate, momentum, width=width)

    return [
        max_learning_rate(at(momentum), width, weight_prediction=weight_prediction)
        for momentum in _MOMENTA.tolist()
    ]

"""A figure of the stable learning rates over momentum, one panel per optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import optax

from pipejax._internal.figures import new_figure

from ._limit import max_learning_rate


class Family(Protocol):
    """A function that makes a linear optimizer from learning rate, momentum and width.

    It takes the width because a correction from `pj.transforms` needs to know it.
    """

    def __call__(
        self, learning_rate: float, momentum: float, *, width: int
    ) -> optax.GradientTransformation:
        """Returns an optimizer whose updates are proportional to the learning rate."""
        ...


_MOMENTA = np.linspace(0.0, 0.99, 100)


def picture(
    families: Mapping[str, Family], widths: Sequence[int] = (1, 2, 3, 4)
) -> Any:
    """Draws the largest stable learning rate times curvature over momentum.

    The figure has one panel per family of optimizers and one line per width. Below its
    line, a width is stable. All lines are limits under a plain delay, without weight
    prediction, so that the panels show what a correction in a family changes. Each
    point of a line is a value of `max_learning_rate`.

    Args:
      families: A mapping from the title of a panel to a function that makes a linear
        optimizer, called as `family(learning_rate, momentum, width=width)`. For example
        `{"heavy-ball": lambda rate, momentum, width: optax.sgd(rate, momentum)}`.
      widths: Pipeline widths K, each at least 1.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      ImportError: If matplotlib is not installed.
      ValueError: If a family is not linear or a width is below 1, as in
        `max_learning_rate`.
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

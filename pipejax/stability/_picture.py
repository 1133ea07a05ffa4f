"""The stable region of momentum and learning rate, a panel a family of optimizers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import optax

from pipejax.picture import new_figure

from ._limit import max_learning_rate


class Family(Protocol):
    """Optimizers of a learning rate, a momentum and the width they are made for."""

    def __call__(
        self, learning_rate: float, momentum: float, *, width: int
    ) -> optax.GradientTransformation:
        """One of them, linear in its gradients."""
        ...


_MOMENTA = np.linspace(0.0, 0.99, 100)


def picture(
    families: Mapping[str, Family], widths: Sequence[int] = (1, 2, 3, 4)
) -> Any:
    """Draws for each momentum the largest stable learning rate times curvature.

    Of plain delays: to see what a correction in a family does about them.

    Args:
      families: by name; what a correction needs of the width is given by keyword:
        `{"heavy-ball": lambda rate, momentum, width: optax.sgd(rate, momentum)}`.
      widths: pipeline widths, a line each; below its line a width is stable.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      ImportError: without matplotlib.
      ValueError: as `pj.stability.max_learning_rate`.
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

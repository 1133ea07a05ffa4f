"""Makes the table of the largest stable learning rates, which are computed."""

import functools
from typing import Any

import optax

import pipejax as pj
from experiments.corrections import average_gradients

_HEAVY_BALL = functools.partial(optax.sgd, momentum=0.9)
_WIDTHS = (1, 2, 3, 4)
_OPTIMIZERS: dict[str, Any] = {
    "SGD": optax.sgd,
    "heavy-ball, 0.5": functools.partial(optax.sgd, momentum=0.5),
    "heavy-ball, 0.9": _HEAVY_BALL,
    "Nesterov, 0.9": functools.partial(_HEAVY_BALL, nesterov=True),
}
# Corrections depend on the width.
_CORRECTED: dict[str, Any] = {
    "`extrapolate_updates`": lambda width: (
        lambda rate: optax.chain(
            _HEAVY_BALL(rate), pj.transforms.extrapolate_updates(width - 1)
        )
    ),
    "average": lambda width: (
        lambda rate: optax.chain(average_gradients(width), _HEAVY_BALL(rate))
    ),
    "`delay_robust`": lambda width: (
        lambda rate: optax.chain(
            _HEAVY_BALL(rate), pj.transforms.delay_robust(0.9, width)
        )
    ),
}


def table() -> list[list[str]]:
    """Returns the largest stable rate of each optimizer at each width."""
    rows: dict[str, list[float]] = {}
    for name, make in _OPTIMIZERS.items():
        rows[name] = [_largest(make, k, weight_prediction=False) for k in _WIDTHS]
    for name, of_width in _CORRECTED.items():
        rows[name] = [
            _largest(of_width(k), k, weight_prediction=False) for k in _WIDTHS
        ]
    for name, make in _OPTIMIZERS.items():
        rows[f"{name}, predicted"] = [_largest(make, k) for k in _WIDTHS]
    return [
        ["optimizer", *(f"K={k}" for k in _WIDTHS)],
        *([name, *(f"{x:.3g}" for x in limits)] for name, limits in rows.items()),
    ]


_largest = pj.stability.max_learning_rate

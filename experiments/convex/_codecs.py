"""A codec's error and a delay, on one problem: alone, and together.

Four devices; what is left after so many steps at a constant rate, as a multiple of what
all bits without a delay leave.
"""

import warnings
from typing import Any

import numpy as np
import optax

import pipejax as pj
from pipejax import codecs, collectives, problems

from ._run import epochs, observed

DEVICES = 4
BLOCK = 64  # elements that share a scale: a problem has few


def all_reduces() -> dict[str, collectives.AllReduce]:
    """How gradients are summed, by name."""
    kept = codecs.error_feedback
    coded = {
        "truncate": codecs.truncate(),
        "int8": codecs.int8(BLOCK),
        "int4": codecs.int4(BLOCK),
        "int4, fed back": kept(codecs.int4(BLOCK)),
        "sign, fed back": kept(codecs.sign(BLOCK)),
        "top 10 %": codecs.top_k(0.1),
        "top 10 %, fed back": kept(codecs.top_k(0.1)),
    }
    made = {name: collectives.two_shot(codec) for name, codec in coded.items()}
    return {"all bits": collectives.psum(), **made}


def excess(
    problem: problems.Problem,
    widths: tuple[int, ...],
    rate: float,
    steps: int,
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    """Mean excess of the last tenth of the steps, a row a codec, a column a width."""
    start = np.zeros(problem.optimum.shape)
    rows = {}
    warnings.simplefilter("ignore", UserWarning)  # that a codec is biased, as meant
    for name, all_reduce in all_reduces().items():
        rows[name] = {
            str(width): float(
                np.mean(
                    [
                        _end(problem, all_reduce, width, rate, steps, start, seed)
                        for seed in seeds
                    ]
                )
            )
            for width in widths
        }
    return rows


def _end(
    problem: problems.Problem,
    all_reduce: collectives.AllReduce,
    width: int,
    rate: float,
    steps: int,
    start: np.ndarray,
    seed: int,
) -> float:
    path = observed(
        problem.loss_fn,
        optax.sgd(rate),
        width,
        start,
        epochs(problem, steps, 4 * DEVICES, seed),
        look=lambda w, _: w,
        mesh=pj.data_mesh(DEVICES),
        all_reduce=all_reduce,
    )
    return float(np.mean([problem.excess(w) for w in path[-steps // 10 :: 20]]))

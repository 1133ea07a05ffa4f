"""Measures the error of a codec and a delay on one problem, alone and together.

There are four devices. The result is the excess that is left after some number of steps
at a constant learning rate. The table shows it as a multiple of the excess with all
bits and without a delay.
"""

import warnings
from typing import Any

import numpy as np
import optax

import pipejax as pj
from pipejax import codecs, collectives, problems

from ._run import epochs, left, path

DEVICES = 4
BLOCK = 64  # elements that share a scale; a problem has few elements

TOP = codecs.top_k(0.1, values=codecs.cast("float32"))

CODECS = {
    "truncate": codecs.truncate(),
    "int8": codecs.int8(BLOCK),
    "int4": codecs.int4(BLOCK),
    "int4, fed back": codecs.error_feedback(codecs.int4(BLOCK)),
    "sign, fed back": codecs.error_feedback(codecs.sign(BLOCK)),
    "top 10 %": TOP,
    "top 10 %, fed back": codecs.error_feedback(TOP),
}


def all_reduces() -> dict[str, collectives.AllReduce]:
    """Returns the all-reduces by name, one without a codec and one for each codec."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # biased on purpose
        coded = {name: collectives.two_shot(codec) for name, codec in CODECS.items()}
    return {"uncompressed": collectives.psum(), **coded}


def excess(
    problem: problems.Problem,
    widths: tuple[int, ...],
    rate: float,
    steps: int,
    seeds: tuple[int, ...],
) -> dict[str, Any]:
    """Returns the mean excess over the last tenth of the steps, by codec and width."""
    rows: dict[str, Any] = {}
    for name, all_reduce in all_reduces().items():
        settings = {"mesh": pj.data_mesh(DEVICES), "all_reduce": all_reduce}
        rows[name] = {}
        for width in widths:
            runs = (
                path(
                    problem,
                    optax.sgd(rate),
                    width,
                    epochs(problem, steps, 4 * DEVICES, seed),
                    **settings,
                )
                for seed in seeds
            )
            rows[name][str(width)] = float(np.mean([left(problem, r) for r in runs]))
    return rows

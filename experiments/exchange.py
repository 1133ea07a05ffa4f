"""Algorithms and codecs for the exchange of gradients, by name, for command lines."""

import dataclasses
from typing import Any, Literal

from pipejax import codecs, collectives

Algorithm = Literal[
    "psum", "two_shot", "ring", "halving_doubling", "tree", "parameter_server"
]
Codec = Literal[
    "none",
    "bf16",
    "truncate",
    "quantize",
    "int8",
    "int4",
    "stochastic_int4",
    "fp8_e4m3",
    "fp8_e5m2",
    "sign",
    "top_k",
    "random_k",
    "power_sgd",
]


def make_all_reduce(
    algorithm: Algorithm, codec: Codec, feedback: bool
) -> collectives.AllReduce:
    """Makes the all-reduce with this algorithm and this codec.

    If `feedback`, error feedback is added to the codec, unless it is "none".
    """
    make = getattr(collectives, algorithm)
    if codec == "none":
        return make()
    chosen: Any = codecs.named(codec)
    if not feedback:
        return make(chosen)
    if codec == "random_k":  # scaled values would make the residual grow
        chosen = dataclasses.replace(chosen, scaled=False)
    return make(codecs.error_feedback(chosen))

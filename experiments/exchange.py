"""How gradients are exchanged, by name: algorithms and codecs for the command line."""

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
    """The algorithm of that name with the codec of that name."""
    make = getattr(collectives, algorithm)
    if codec == "none":
        return make()
    chosen: Any = codecs.named(codec)
    if not feedback:
        return make(chosen)
    if codec == "random_k":  # what is sent later is not to be scaled up now
        chosen = dataclasses.replace(chosen, scaled=False)
    return make(codecs.error_feedback(chosen))

"""How gradients are exchanged, by name: algorithms and codecs for the command line."""

from collections.abc import Callable
from typing import Literal

import jax

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

# The paper's first two, and what has come since; keys and shares as in the tables.
CODECS: dict[str, Callable[[bool], codecs.Codec]] = {
    "bf16": lambda _: codecs.bf16(),
    "truncate": lambda _: codecs.truncate(),
    "quantize": lambda _: codecs.quantize(8),
    "int8": lambda _: codecs.int8(),
    "int4": lambda _: codecs.int4(),
    "stochastic_int4": lambda _: codecs.stochastic(codecs.int4(), jax.random.key(0)),
    "fp8_e4m3": lambda _: codecs.fp8("e4m3"),
    "fp8_e5m2": lambda _: codecs.fp8("e5m2"),
    "sign": lambda _: codecs.sign(),
    "top_k": lambda _: codecs.top_k(0.01),
    "random_k": lambda fed: codecs.random_k(0.01, jax.random.key(0), scaled=not fed),
    "power_sgd": lambda _: codecs.power_sgd(4, jax.random.key(0)),
}


def make_all_reduce(
    algorithm: Algorithm, codec: Codec, feedback: bool
) -> collectives.AllReduce:
    """The algorithm of that name with the codec of that name."""
    make = getattr(collectives, algorithm)
    if codec == "none":
        return make()
    chosen = CODECS[codec](feedback)
    return make(codecs.error_feedback(chosen) if feedback else chosen)

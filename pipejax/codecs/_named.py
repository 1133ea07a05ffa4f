"""Codecs by name, each as one would begin with it: what command lines offer."""

from collections.abc import Callable

import jax

from ._blocks import fp8, int4, int8, sign
from ._cast import bf16, truncate
from ._codec import Codec
from ._power_sgd import power_sgd
from ._quantize import quantize
from ._rounding import stochastic
from ._sparse import random_k, top_k

NAMES: dict[str, Callable[[], Codec]] = {
    "bf16": bf16,
    "truncate": truncate,
    "quantize": lambda: quantize(8),
    "int8": int8,
    "int4": int4,
    "stochastic_int4": lambda: stochastic(int4(), jax.random.key(0)),
    "fp8_e4m3": lambda: fp8("e4m3"),
    "fp8_e5m2": lambda: fp8("e5m2"),
    "sign": sign,
    "top_k": lambda: top_k(0.01),
    "random_k": lambda: random_k(0.01, jax.random.key(0)),
    "power_sgd": lambda: power_sgd(4, jax.random.key(0)),
}


def named(name: str) -> Codec:
    """The codec of that name: 1 % of the elements, rank 4, 8 bits, blocks of 256.

    Raises:
      ValueError: for a name that none has.
    """
    if name not in NAMES:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}; got {name!r}.")
    return NAMES[name]()

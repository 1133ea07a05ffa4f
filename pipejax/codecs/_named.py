"""Codecs by name, for command lines, each with the settings to try first."""

from collections.abc import Callable

import jax

from ._acp_sgd import acp_sgd
from ._cast import bf16, truncate
from ._codec import Codec
from ._floats import fp4, fp8
from ._integers import int4, int8
from ._power_sgd import power_sgd
from ._quantize import quantize
from ._rotated import rotated
from ._rounding import stochastic
from ._signs import int2, sign
from ._sparse import random_k, top_k

# Functions that make the codecs, in the order in which command lines list the names. A
# codec is not made on import, because its key is a JAX array, and JAX cannot join
# processes once an array exists.
NAMES: dict[str, Callable[[], Codec]] = {
    "bf16": bf16,
    "truncate": truncate,
    "quantize": lambda: quantize(8),
    "int8": int8,
    "int4": int4,
    "stochastic_int4": lambda: stochastic(int4(), jax.random.key(0)),
    "rotated_int4": lambda: rotated(int4(), jax.random.key(0)),
    "fp4": fp4,
    "int2": int2,
    "fp8_e4m3": lambda: fp8("e4m3"),
    "fp8_e5m2": lambda: fp8("e5m2"),
    "sign": sign,
    "top_k": lambda: top_k(0.01),
    "random_k": lambda: random_k(0.01, jax.random.key(0)),
    "power_sgd": lambda: power_sgd(4, jax.random.key(0)),
    "acp_sgd": lambda: acp_sgd(4, jax.random.key(0)),
}


def named(name: str) -> Codec:
    """Returns the codec of a given name, without error feedback.

    `quantize` has 8 bits. `top_k` and `random_k` send 1 % of the elements. `power_sgd`
    and `acp_sgd` have rank 4. The random codecs use the key `jax.random.key(0)`. All
    other settings are the defaults. To choose them, call the function of the codec
    instead.

    Args:
      name: One of the keys of `NAMES`.

    Raises:
      ValueError: If no codec has this name.

    Examples:
      >>> named("int8").size(256)  # 256 codes of 1 byte and a scale of 4 bytes
      260
    """
    if name not in NAMES:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}; got {name!r}.")
    return NAMES[name]()

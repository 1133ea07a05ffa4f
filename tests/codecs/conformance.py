"""Lists every codec once: a codec that is added to `CODECS` gets every test."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pipejax import codecs as c
from pipejax.codecs import error_feedback, stochastic

from ..grid import each
from .bounds import bound

KEY = jax.random.key(0)
# power_sgd is bound to matrices of 16 x 12 and 12 x 20, and to three leaves that travel
# uncompressed: 192 + 240 + 1 + 75 + 4 = N elements.
SHAPES = ((16, 12), (3, 4, 20), (), (75,), (2, 2))
N = 512

CODECS = {
    "float32": c.cast("float32"),
    "bfloat16": c.cast("bfloat16"),
    "float16": c.cast("float16"),
    "bf16": c.bf16(),
    "truncate": c.truncate(),
    "quantize 8": c.quantize(8),
    "quantize 4": c.quantize(4),
    "quantize 2": c.quantize(2),
    "quantize 1": c.quantize(1),
    "int8": c.int8(),
    "int8, 8": c.int8(block=8),
    "int4": c.int4(),
    "int4, 8": c.int4(block=8),
    "int2": c.int2(block=128),
    "int2, 8": c.int2(block=8),
    "fp4": c.fp4(),
    "fp4, 8": c.fp4(block=8),
    "fp8 e4m3": c.fp8(),
    "fp8 e5m2": c.fp8("e5m2"),
    "fp8 e4m3, 8": c.fp8(block=8),
    "sign": c.sign(block=64),
    "sign, 8": c.sign(block=8),
    "top_k 5": c.top_k(5),
    "top_k 0.1": c.top_k(0.1, chunk=100),
    "top_k int8": c.top_k(0.1, values=c.int8(8), chunk=64),
    "random_k 5": c.random_k(5, KEY),
    "random_k 0.1": c.random_k(0.1, KEY),
    "random_k 0.7": c.random_k(0.7, KEY),
    "random_k 5, unscaled": c.random_k(5, KEY, scaled=False),
    "random_k 0.1, unscaled": c.random_k(0.1, KEY, scaled=False),
    "power_sgd 1": c.power_sgd(1, KEY).of(SHAPES),
    "power_sgd 2": c.power_sgd(2, KEY).of(SHAPES),
    "acp_sgd 2": c.acp_sgd(2, KEY).of(SHAPES),
    "stochastic int8": stochastic(c.int8(), KEY),
    "stochastic int4": stochastic(c.int4(block=8), KEY),
    "stochastic fp4": stochastic(c.fp4(), KEY),
    "stochastic quantize": stochastic(c.quantize(4), KEY),
    "stochastic bf16": stochastic(c.bf16(), KEY),
    "rotated int8": c.rotated(c.int8(), KEY, block=128),
    "rotated int4": c.rotated(c.int4(block=8), KEY, block=64),
    "stochastic int4, rotated": c.rotated(stochastic(c.int4(), KEY), KEY, block=128),
    "feedback bf16": error_feedback(c.bf16()),
    "feedback truncate": error_feedback(c.truncate()),
    "feedback quantize": error_feedback(c.quantize(4)),
    "feedback int4": error_feedback(c.int4()),
    "feedback int2": error_feedback(c.int2(block=128)),
    "feedback int2, rotated": error_feedback(c.rotated(c.int2(64), KEY, block=128)),
    "feedback fp4": error_feedback(c.fp4()),
    "feedback fp8": error_feedback(c.fp8()),
    "feedback rotated": error_feedback(c.rotated(c.int4(), KEY, block=128)),
    "feedback sign": error_feedback(c.sign(block=64)),
    "feedback top_k": error_feedback(c.top_k(0.1)),
    "feedback acp_sgd": error_feedback(c.acp_sgd(1, KEY)).of(SHAPES),
    "feedback int8, decay": error_feedback(c.int8(), decay=0.5),
    "feedback power_sgd, decay": error_feedback(c.power_sgd(1, KEY), 0.5).of(SHAPES),
    "feedback random_k": error_feedback(c.random_k(0.1, KEY, scaled=False)),
    "feedback power_sgd": error_feedback(c.power_sgd(2, KEY)).of(SHAPES),
}
FEEDBACK = [name for name in CODECS if name.startswith("feedback")]
# Each of these codecs differs from another one above only in a number, or in the codec
# that it wraps.
VARIANTS = {
    *("float16", "bf16", "quantize 4", "quantize 2", "int8, 8", "int4", "sign"),
    *(
        "fp8 e5m2",
        "fp8 e4m3, 8",
        "top_k 5",
        "top_k int8",
        "random_k 0.1",
        "random_k 0.7",
    ),
    *("random_k 5, unscaled", "random_k 0.1, unscaled", "power_sgd 2"),
    *("stochastic quantize", "stochastic int4", "feedback bf16", "feedback quantize"),
    *("feedback int4", "feedback fp8"),
    *("float32", "stochastic bf16", "feedback truncate", "rotated int8"),
    *("stochastic int4, rotated", "feedback rotated", "int2, 8", "fp4, 8"),
    *("stochastic fp4", "feedback int2", "feedback int2, rotated", "feedback fp4"),
    *("feedback int8, decay", "feedback power_sgd, decay", "acp_sgd 2"),
}


def takes(codec: c.Codec, n: int) -> bool:
    """Returns whether the codec accepts vectors of n elements."""
    try:
        codec.size(n)
    except ValueError:
        return False
    return True


def lengths(name: str) -> list[int]:
    """Returns the length of the shortest vector that the codec accepts, and N."""
    codec = CODECS[name]
    return [n for n in sorted({codec.multiple, N}) if takes(codec, n)]


every_length = pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(
            name,
            n,
            marks=pytest.mark.full if name in VARIANTS or n > lengths(name)[0] else (),
        )
        for name in CODECS
        for n in lengths(name)
    ],
)
every_codec = pytest.mark.parametrize("name", each(CODECS, full=VARIANTS))


class Programs(NamedTuple):
    """The compiled methods of a codec for vectors of one length."""

    state: Any
    encode: Callable[[jax.Array, Any], tuple[jax.Array, Any]]
    decode: Callable[[jax.Array], jax.Array]
    bound: Callable[[jax.Array], jax.Array]


# The dtypes of vectors. A part of `make soak` sets `JAX_ENABLE_X64=1` to add float64.
DTYPES = ["float32", "float64"] if jax.config.jax_enable_x64 else ["float32"]


@functools.cache
def compiled(name: str, n: int, dtype: str = "float32") -> Programs:
    """Compiles a codec for single vectors; `state` makes a state from a seed."""
    codec = CODECS[name].of(dtype=dtype)
    return Programs(
        jax.jit(lambda seed: codec.init(n, jnp.uint32(seed))),
        jax.jit(codec.encode),
        jax.jit(lambda payload: codec.decode(payload, n)),
        jax.jit(lambda x: jnp.broadcast_to(bound(codec, x), (n,))),
    )


MAX = float(np.finfo(np.float32).max)
# XLA may treat a denormal number as zero.
TINY = float(np.finfo(np.float32).smallest_normal)
EPS = 2.0**-24  # relative error of rounding to the nearest float32

seeds = st.integers(0, 2**32 - 1)
exponents = st.floats(-30, 30)


dtypes = st.sampled_from(DTYPES)


def normal(n: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Returns a vector of n normal random numbers."""
    return np.random.default_rng(seed).normal(size=n).astype(dtype)


# Families of vectors, `f(rng, n)`, of order of magnitude 1 where it can be chosen.
FAMILIES = {
    "normal": lambda rng, n: rng.normal(size=n),
    "wide": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.uniform(-30, 30, n),
    "constant": lambda rng, n: np.full(n, rng.normal()),
    "far from zero": lambda rng, n: 100 + rng.normal(size=n),
    "one outlier": lambda rng, n: np.where(
        np.arange(n) == rng.integers(n), 1e6, rng.normal(size=n)
    ),
    "one element": lambda rng, n: np.where(
        np.arange(n) == rng.integers(n), rng.normal(), 0
    ),
    "zeros": lambda rng, n: np.zeros(n),
    "signed zeros": lambda rng, n: np.copysign(0.0, rng.normal(size=n)),
    "denormal": lambda rng, n: 1e-40 * rng.normal(size=n),
    "huge": lambda rng, n: rng.uniform(-MAX, MAX, n),
}
# These families keep their order of magnitude; the others are scaled.
FIXED = {"wide", "zeros", "signed zeros", "denormal", "huge"}


ROWS = len(FAMILIES)


@functools.cache
def programs(name: str, n: int, dtype: str = "float32") -> Programs:
    """Compiles a codec for the rows of a matrix [ROWS, n]; `state` holds the states."""
    one = compiled(name, n, dtype)
    functions = [jax.jit(jax.vmap(function)) for function in one[1:]]
    return Programs(jax.vmap(one.state)(jnp.arange(ROWS)), *functions)


def vectors(n: int, exponent: float, seed: int, dtype: str = "float32") -> np.ndarray:
    """Returns one vector of each family, [families, n], scaled by `10^exponent`."""
    rng = np.random.default_rng(seed)
    rows = [
        make(rng, n) * (1.0 if family in FIXED else 10.0**exponent)
        for family, make in FAMILIES.items()
    ]
    return np.clip(rows, -MAX, MAX).astype(dtype)


def due(codec: c.Codec, x: jax.Array, state: Any) -> np.ndarray:
    """Returns the value to encode: x, plus the residual if there is error feedback."""
    if not hasattr(state, "residual"):
        return np.asarray(x)
    return np.asarray(x + codec.decay * jnp.asarray(residual(state, x)))


def residual(state: Any, x: jax.Array) -> np.ndarray:
    """Returns the residual of a codec's state, in the shape of x."""
    leaves = jax.tree.leaves(state.residual)
    rows = [np.asarray(leaf).reshape(*x.shape[:-1], -1) for leaf in leaves]
    return np.concatenate(rows, axis=-1)

"""Codecs that round to levels: to the nearest, or up or down at random.

With the two levels around y at floor(y) and floor(y) + 1, in units of their distance:

- nearest: `round(y)`; error at most 1/2, the same for the same y
- stochastic: `floor(y + u)`, u uniform on [0, 1); error below 1, and `E = y`

Reference for the second: Alistarh et al., QSGD, 2017, https://arxiv.org/abs/1610.02132
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._codec import Codec


class Rounding(Codec):
    """A codec that rounds; `rounded` is its `encode`."""

    @property
    def takes_noise(self) -> bool:
        """Whether `stochastic` can have it."""
        return True

    @abc.abstractmethod
    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """The payload of x [n]: to the nearest level, or with noise [n] in [0, 1)."""

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Rounds to the nearest level."""
        return self.rounded(x, None), state


def to_integer(y: jax.Array, noise: jax.Array | None, top: float) -> jax.Array:
    """y, in magnitude at most `top`, to an integer of its own dtype, no larger."""
    if noise is None:
        return jnp.round(y)
    # In float32 the sum may round up to the next integer, and y itself be beyond `top`.
    return jnp.clip(jnp.floor(y + noise.reshape(y.shape)), -top, top)


@dataclasses.dataclass(frozen=True, eq=False)
class Stochastic(Codec):
    """See `stochastic`."""

    codec: Rounding
    key: jax.Array

    @property
    def multiple(self) -> int:
        """As of the codec inside."""
        return self.codec.multiple

    @property
    def unbiased(self) -> bool:
        """It is; what leaves the range of 16 bits aside."""
        return True

    def init(self, n: int, seed: jax.Array) -> Any:
        """The key, another for each seed."""
        del n
        return jax.random.key_data(jax.random.fold_in(self.key, seed))

    def size(self, n: int) -> int:
        """As of the codec inside."""
        return self.codec.size(n)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Rounds up or down at random, in proportion to how near either level is."""
        impl = jax.random.key_impl(self.key)
        key, now = jax.random.split(jax.random.wrap_key_data(state, impl=impl))
        noise = jax.random.uniform(now, x.shape, jnp.float32)
        return self.codec.rounded(x, noise), jax.random.key_data(key)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """As the codec inside."""
        return self.codec.decode(payload, n)

    def bound(self, x: jax.Array) -> jax.Array:
        """Twice that of rounding to the nearest."""
        return 2 * self.codec.bound(x)


def stochastic(codec: Codec, key: jax.Array) -> Stochastic:
    """Rounds up or down at random, so that what is lost has mean zero.

      `E[decode(encode(x))] = x`

    Where nearest rounding turns each small element of a block into zero, step after
    step, this one keeps their sum, at the price of variance.

    Args:
      codec: one that rounds: `int8`, `int4`, `quantize`, or `cast` to bfloat16.
      key: from `jax.random.key`. The state holds a key of its own for each place at
        which something is encoded; `impl="rbg"` is the faster one on TPUs.

    Raises:
      ValueError: for a codec that does not round, or what is no key.
    """
    if not isinstance(codec, Rounding) or not codec.takes_noise:
        raise ValueError(
            "`codec` must round to levels, as pj.codecs.int8(), int4(), quantize() and"
            f" bf16() do; got {codec}. Leave stochastic out, or take one of these."
        )
    check_key(key)
    return Stochastic(codec, key)


def check_key(key: Any) -> None:
    """A ValueError unless it is one typed PRNG key."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(
        key.dtype, jax.dtypes.prng_key
    )
    if not typed or key.shape != ():
        raise ValueError(f"`key` must be one key of jax.random.key(seed), got {key!r}.")

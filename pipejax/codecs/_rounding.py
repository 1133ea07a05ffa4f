"""Codecs that round each element to one of two neighboring levels.

Let `y` be an element in units of the level spacing. Rounding to the nearest level,
`round(y)`, has an error of at most 1/2, and always the same one for the same `y`.
Stochastic rounding, `floor(y + u)` with `u` uniform on `[0, 1)`, has an error below 1,
and the expectation of the rounded number is `y`.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._codec import Codec


class Rounding(Codec):
    @property
    def takes_noise(self) -> bool:
        """Returns whether `rounded` accepts noise, so that `stochastic` can wrap it."""
        return True

    @abc.abstractmethod
    def rounded(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Rounds a vector to levels and returns the payload.

        `noise` has a random number in `[0, 1)` for each element. `None` rounds to the
        nearest level.
        """

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return self.rounded(x, None), state


def to_integer(y: jax.Array, noise: jax.Array | None, top: float) -> jax.Array:
    """Rounds numbers of magnitude at most `top` to integers in the same range."""
    if noise is None:
        # Halves go to the even integer, so that their errors have both signs.
        return jnp.round(y)
    # The clip has two reasons: the sum may round up to the next integer in float32, and
    # rounding errors may leave `y` itself slightly outside of [-top, top].
    return jnp.clip(jnp.floor(y + noise.reshape(y.shape)), -top, top)


@dataclasses.dataclass(frozen=True, eq=False)
class Stochastic(Codec):
    """Rounds as `codec`, but randomly; see `stochastic`."""

    codec: Rounding
    key: jax.Array

    @property
    def multiple(self) -> int:
        return self.codec.multiple

    def init(self, n: int, seed: jax.Array) -> Any:
        del n
        return jax.random.key_data(jax.random.fold_in(self.key, seed))

    def size(self, n: int) -> int:
        return self.codec.size(n)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        impl = jax.random.key_impl(self.key)
        # Each vector has its own noise: one half of the key is used up, and the other
        # is kept.
        key, now = jax.random.split(jax.random.wrap_key_data(state, impl=impl))
        noise = jax.random.uniform(now, x.shape, jnp.float32)
        return self.codec.rounded(x, noise), jax.random.key_data(key)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return self.codec.decode(payload, n)


def stochastic(codec: Codec, key: jax.Array) -> Stochastic:
    r"""Wraps a codec so that it rounds up or down at random, without bias.

    The expectation of the decoded vector is the encoded vector `x`:

    $$E[\mathrm{decode}(\mathrm{encode}(x))] = x$$

    Rounding to the nearest level turns every small element of a block into zero, in
    each step. Stochastic rounding preserves the sum of such elements on average, and
    needs no residual, unlike `error_feedback`. In return, the decoded vector has a
    larger variance, and the error bound doubles.

    Args:
      codec: A codec that rounds to levels: `int8`, `int4`, `quantize`, or `cast` to
        bfloat16.
      key: A key from `jax.random.key`, from which each place where an algorithm encodes
        derives its own. On TPUs, `jax.random.key(seed, impl="rbg")` is faster.

    Returns:
      A codec with the same payload format.

    Raises:
      ValueError: If `codec` does not round to levels, or if `key` is not a single key.

    Examples:
      The levels are 1 apart. Here, 0.3 becomes 0 or 1, with mean 0.3:

      >>> from pipejax import codecs
      >>> codec = stochastic(codecs.int4(block=4096), jax.random.key(0))
      >>> x = jnp.full(8192, 0.3).at[::4096].set(7.0)
      >>> payload, state = codec.encode(x, codec.init(8192, jnp.uint32(0)))
      >>> print(f"{codec.decode(payload, 8192)[1:4096].mean():.1f}")
      0.3

    References:
      Alistarh et al., QSGD, 2017, https://arxiv.org/abs/1610.02132
    """
    if not isinstance(codec, Rounding) or not codec.takes_noise:
        raise ValueError(
            "`codec` must round to levels, as pj.codecs.int8(), int4(), quantize() and"
            f" bf16() do; got {codec}. Use one of these, or leave out stochastic."
        )
    check_key(key)
    return Stochastic(codec, key)


def check_key(key: Any) -> None:
    typed = isinstance(key, jax.Array) and jnp.issubdtype(
        key.dtype, jax.dtypes.prng_key
    )
    if not typed or key.shape != ():
        raise ValueError(
            f"`key` must be a single key from jax.random.key(seed); got {key!r}."
        )

"""Few of the elements: the largest, or some at random."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.bits import from_words, poison, to_words
from pipejax.integers import is_integer

from ._codec import Codec, Linear
from ._rounding import check_key


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """See `top_k`."""

    k: int | float

    @property
    def needs_feedback(self) -> bool:
        """What is small, but always there, would never be sent."""
        return True

    def size(self, n: int) -> int:
        """8 bytes for each that is sent."""
        return 8 * count(self.k, n)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Places, then values."""
        x = x.astype(jnp.float32)
        # NaN among the largest. Of floats, for XLA:CPU sorts all of any other numbers.
        magnitude = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
        _, places = lax.top_k(magnitude, count(self.k, x.size))
        payload = [places.astype(jnp.uint32), to_words(x[places], jnp.uint32)]
        return jnp.concatenate(payload), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """Zero where nothing was sent."""
        places, values = jnp.split(payload, 2)
        zeros = jnp.zeros(n, jnp.float32)
        return zeros.at[places].set(from_words(values, jnp.float32))

    def bound(self, x: jax.Array) -> jax.Array:
        """The smallest magnitude that is sent."""
        return lax.top_k(jnp.abs(x), count(self.k, x.size))[0].min(initial=jnp.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class RandomK(Linear):
    """See `random_k`."""

    k: int | float
    key: jax.Array
    scaled: bool = True

    @property
    def unbiased(self) -> bool:
        """If it is scaled up."""
        return self.scaled

    @property
    def needs_feedback(self) -> bool:
        """If it is not."""
        return not self.scaled

    @property
    def rounds(self) -> int:
        """One, where all devices draw the same places."""
        return 1

    def init(self, n: int, seed: jax.Array) -> Any:
        """The key, another for each seed."""
        del n
        return jax.random.key_data(jax.random.fold_in(self.key, seed))

    def size(self, n: int) -> int:
        """4 bytes for each that is sent, and 4 from which the places follow."""
        return 4 * (1 + count(self.k, n))

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The seed of the places, then values."""
        seed = self._seed(state)
        drawn = self.project(x.astype(jnp.float32), state, ())
        values = to_words(drawn, jnp.uint32)
        return jnp.concatenate([seed[None], values]), self._next(state)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """Zero where nothing was sent."""
        return self._placed(payload[0], from_words(payload[1:], jnp.float32), n)

    def bound(self, x: jax.Array) -> jax.Array:
        """`|x|`, or what scaling adds where that is more."""
        strata = -(-x.size // count(self.k, x.size))
        times = max(1, strata - 1) if self.scaled else 1
        sent = (strata if self.scaled else 1) * jnp.abs(x)
        return jnp.where(jnp.isinf(sent), sent, times * (1 + 1e-6) * jnp.abs(x))

    def round_sizes(self, n: int) -> tuple[int, ...]:
        """The drawn values; all devices draw the same."""
        return (count(self.k, n),)

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """The drawn values; none of them finite if one element is not."""
        del sums
        x: jax.Array = leaves
        k = count(self.k, x.size)
        strata = -(-x.size // k)
        rows = jnp.pad(x, (0, k * strata - x.size)).reshape(k, strata)
        places = _drawn(self._seed(state), k, strata)
        values = jnp.take_along_axis(rows, places[:, None], axis=1)[:, 0]
        return values * (strata if self.scaled else 1) + poison(x)

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        """Zero where nothing was drawn."""
        return self._placed(self._seed(state), sums[0], n)

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """The next key."""
        del leaves, sums, own
        return self._next(state)

    def _placed(self, seed: jax.Array, values: jax.Array, n: int) -> jax.Array:
        k = values.size
        strata = -(-n // k)
        zeros = jnp.zeros((k, strata), values.dtype)
        each = jnp.arange(k, dtype=jnp.int32)
        rows = zeros.at[each, _drawn(seed, k, strata)].set(values)
        return rows.reshape(-1)[:n]

    def _keys(self, state: Any) -> jax.Array:
        impl = jax.random.key_impl(self.key)
        return jax.random.split(jax.random.wrap_key_data(state, impl=impl))

    def _seed(self, state: Any) -> jax.Array:
        return jax.random.bits(self._keys(state)[1], dtype=jnp.uint32)

    def _next(self, state: Any) -> Any:
        return jax.random.key_data(self._keys(state)[0])


def top_k(k: int | float) -> TopK:
    """The k elements of largest magnitude, each with its place: 8 bytes for each.

    Args:
      k: how many of each vector that is encoded, or, below 1, which share of them. An
        algorithm that cuts a vector into p parts encodes each, and sends k of each.

    Raises:
      ValueError: for k below 1 that is no share; when encoding, for k above n.

    Reference: Stich et al. 2018, https://arxiv.org/abs/1809.07599

    >>> codec = top_k(1)
    >>> codec.decode(codec.encode(jnp.float32([1, -3, 2]), ())[0], 3)
    Array([ 0., -3.,  0.], dtype=float32)
    """
    return TopK(check_k(k))


def random_k(k: int | float, key: jax.Array, *, scaled: bool = True) -> RandomK:
    """k elements at random, one from each of k equal parts: 4 bytes for each.

    Drawn so, not freely, no element is sent twice and no sorting is needed. Every
    element is sent with probability `1/m`, `m = ceil(n/k)` the length of a part.

    Args:
      k: how many, or which share, as of `top_k`.
      key: from `jax.random.key`.
      scaled: send `m x`, so that the expectation is x. `error_feedback` wants it
        unscaled: what it adds up would otherwise grow.

    Raises:
      ValueError: as `top_k`; for what is no key.
    """
    check_key(key)
    return RandomK(check_k(k), key, scaled)


def count(k: int | float, n: int) -> int:
    """How many of n elements; a ValueError if there are not that many."""
    if isinstance(k, float):
        return max(1, round(k * n))
    if k > n:
        raise ValueError(
            f"`k` must be at most the {n} elements of what is encoded, got {k}. Choose"
            " less, or a share such as 0.01."
        )
    return k


def check_k(k: int | float) -> int | float:
    """`k`, or a ValueError if it is neither a count nor a share."""
    if isinstance(k, float) and 0 < k < 1:
        return k
    if isinstance(k, float) or not is_integer(k, 1):
        raise ValueError(
            "`k` must be an integer of at least 1, or a share between 0 and 1 such as"
            f" 0.01; got {k!r}."
        )
    return operator.index(k)


def _drawn(seed: jax.Array, k: int, strata: int) -> jax.Array:
    """Which element of each of k parts."""
    return jax.random.randint(jax.random.key(seed), (k,), 0, strata, jnp.int32)

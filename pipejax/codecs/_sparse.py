"""Codecs that send a few elements: the largest ones, or randomly drawn ones."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.bits import from_words, poison, to_words
from pipejax._internal.integers import is_integer

from ._codec import Codec, Linear
from ._rounding import check_key


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """Sends the elements of largest magnitude; see `top_k`."""

    k: int | float

    needs_feedback = True  # elements that stay small would never be sent

    def size(self, n: int) -> int:
        return 8 * self._count(n)  # an index and a value of 4 bytes each

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        x = x.astype(jnp.float32)
        # NaN counts as the largest magnitude, so that it is sent. The magnitudes are
        # floats because XLA:CPU sorts the whole vector for any other dtype.
        magnitude = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
        _, places = lax.top_k(magnitude, self._count(x.size))
        payload = [places.astype(jnp.uint32), to_words(x[places], jnp.uint32)]
        return jnp.concatenate(payload), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        places, values = jnp.split(payload, 2)
        zeros = jnp.zeros(n, jnp.float32)
        return zeros.at[places].set(from_words(values, jnp.float32))

    def _count(self, n: int) -> int:
        _check_indices("encoded vector", n)
        return count(self.k, n)


@dataclasses.dataclass(frozen=True, eq=False)
class RandomK(Linear):
    """Sends one drawn element of each of k equal parts, the strata; see `random_k`."""

    k: int | float
    key: jax.Array
    scaled: bool = True

    @property
    def needs_feedback(self) -> bool:
        return not self.scaled

    rounds = 1  # values can be summed, since all devices draw the same elements

    def init(self, n: int, seed: jax.Array) -> Any:
        del n
        return jax.random.key_data(jax.random.fold_in(self.key, seed))

    def size(self, n: int) -> int:
        return 4 * (1 + count(self.k, n))  # the seed of the draw, and the values

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Returns the seed from which the draw follows, and then the drawn values."""
        seed = self._seed(state)
        drawn = self.project(x.astype(jnp.float32), state, ())
        values = to_words(drawn, jnp.uint32)
        return jnp.concatenate([seed[None], values]), self._next(state)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return self._placed(payload[0], from_words(payload[1:], jnp.float32), n)

    def round_sizes(self, n: int) -> tuple[int, ...]:
        return (count(self.k, n),)

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Returns the drawn values, all of them NaN if any element is not finite."""
        del sums
        x: jax.Array = leaves
        k = count(self.k, x.size)
        strata = -(-x.size // k)
        # Each row is one of the strata. The last ones may hold zeros of the padding,
        # which are drawn in place of elements.
        rows = jnp.pad(x, (0, k * strata - x.size)).reshape(k, strata)
        places = _drawn(self._seed(state), k, strata)
        values = jnp.take_along_axis(rows, places[:, None], axis=1)[:, 0]
        # Each element is drawn with probability 1 / strata, which the factor makes up
        # for. A NaN or an infinity must be noticed even if it is not drawn.
        return values * (strata if self.scaled else 1) + poison(x)

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        return self._placed(self._seed(state), sums[0], n)

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        del leaves, sums, own
        return self._next(state)

    def _placed(self, seed: jax.Array, values: jax.Array, n: int) -> jax.Array:
        """Returns a vector `[n]` with `values` at the places that `seed` draws."""
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
        # 32 bits go on the wire with the values, in place of the whole data of a key.
        return jax.random.bits(self._keys(state)[1], dtype=jnp.uint32)

    def _next(self, state: Any) -> Any:
        return jax.random.key_data(self._keys(state)[0])


def top_k(k: int | float) -> TopK:
    """Returns a codec that sends the k elements of largest magnitude.

    Each element takes 8 bytes, 4 for its index and 4 for its value. All other elements
    decode to zero. Wrap the codec in `error_feedback`: without it, an element that is
    never among the largest is never sent.

    Args:
      k: The number of elements to send, an integer of at least 1, or the fraction of
        elements to send, a float between 0 and 1, which is rounded to at least 1. It
        counts for every vector that is encoded: an algorithm that cuts the gradients
        into p pieces sends k elements of each.

    Raises:
      ValueError: If `k` breaks its rule. When a vector is encoded, also if it has fewer
        than `k` elements.

    Examples:
      >>> codec = top_k(1)
      >>> payload, _ = codec.encode(jnp.float32([1, -3, 2]), ())
      >>> codec.decode(payload, 3)
      Array([ 0., -3.,  0.], dtype=float32)

    References:
      Stich et al., Sparsified SGD with Memory, NeurIPS 2018,
      https://arxiv.org/abs/1809.07599
    """
    return TopK(check_k(k))


def random_k(k: int | float, key: jax.Array, *, scaled: bool = True) -> RandomK:
    r"""Returns a codec that sends k elements, drawn at random.

    The codec divides a vector of n elements into k parts of equal length

    $$m = \lceil n / k \rceil$$

    and draws one element from each part, so that every element is sent with probability
    `1/m`. In contrast to k independent draws, no element is sent twice, and nothing
    needs to be sorted. The last part is padded with zeros.

    Each element takes 4 bytes. Its index is not sent, because it follows from a seed
    that takes 4 bytes per vector. `top_k` needs 8 bytes for each element and a search,
    and sends those that matter most. `random_k` is linear, so it works with `psum`.

    Args:
      k: Same as in `top_k`.
      key: A key from `jax.random.key`.
      scaled: Whether to send `m x` for an element `x`, which makes the expectation of
        the decoded element equal to `x`. Use `scaled=False` with `error_feedback`,
        whose residual would otherwise grow.

    Raises:
      ValueError: If `k` or `key` breaks its rule. When a vector is encoded, also if it
        has fewer than `k` elements.

    Examples:
      Two elements of eight are sent, one from each half, and multiplied by 4:

      >>> codec = random_k(2, jax.random.key(0))
      >>> state = codec.init(8, jnp.uint32(0))
      >>> payload, state = codec.encode(jnp.ones(8), state)
      >>> payload.nbytes, sorted(codec.decode(payload, 8).tolist())
      (12, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 4.0])

    References:
      Stich et al., Sparsified SGD with Memory, NeurIPS 2018,
      https://arxiv.org/abs/1809.07599
    """
    check_key(key)
    return RandomK(check_k(k), key, scaled)


def count(k: int | float, n: int) -> int:
    """Returns how many of `n` elements to send, if `k` is a number or a fraction."""
    if isinstance(k, float):
        k = max(1, round(k * n))
        _check_indices("payload", k)
        return k
    if k > n:
        raise ValueError(
            f"`k` must be at most the {n} elements of an encoded vector; got {k}."
            " Choose a smaller number, or a fraction such as 0.01."
        )
    return k


def _check_indices(of: str, length: int) -> None:
    most = jnp.iinfo(jnp.int32).max
    if length > most:
        raise ValueError(
            f"`codec` must have at most {most:,} elements in the {of}, which is as many"
            f" as int32 can index; got {length:,}. Choose an algorithm that encodes"
            " pieces of the gradients, such as pj.collectives.two_shot on more devices,"
            " a smaller `k`, or a codec that does not select elements, such as"
            " pj.codecs.int4()."
        )


def check_k(k: int | float) -> int | float:
    if isinstance(k, float) and 0 < k < 1:
        return k
    if isinstance(k, float) or not is_integer(k, 1):
        raise ValueError(
            "`k` must be an integer of at least 1, or a fraction between 0 and 1 such"
            f" as 0.01; got {k!r}."
        )
    return operator.index(k)


def _drawn(seed: jax.Array, k: int, strata: int) -> jax.Array:
    """Draws one place in `[0, strata)` for each of the k parts: int32 `[k]`."""
    return jax.random.randint(jax.random.key(seed), (k,), 0, strata, jnp.int32)

"""Codecs that send a few elements: the largest ones, or randomly drawn ones."""

import dataclasses
import math
import numbers
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pipejax._internal.bits import from_words, pack, poison, to_words, unpack
from pipejax._internal.integers import is_integer
from pipejax._internal.keys import key_of
from pipejax._internal.ravel import Shapes

from ._cast import Cast
from ._check import check_inner
from ._codec import Codec, Linear
from ._rounding import check_key


class Chosen(NamedTuple):
    """How many elements of a vector are sent."""

    chunks: int
    length: int  # of a chunk; the last one may end with zeros
    k: int  # elements of each chunk that are sent
    padded: int  # elements that are sent, padded to whole words and blocks


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """Sends the elements of largest magnitude of each chunk; see `top_k`."""

    k: int | float
    values: Codec
    chunk: int

    needs_feedback = True  # elements that stay small would never be sent

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "TopK":
        # The values are no leaves, and are rounded to float32.
        del shapes, dtype
        return dataclasses.replace(self, values=self.values.of(devices=devices))

    def init(self, n: int, seed: jax.Array) -> Any:
        return self.values.init(self._chosen(n).padded, seed)

    def size(self, n: int) -> int:
        padded = self._chosen(n).padded
        return padded * 12 // 8 + self.values.size(padded)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Returns 8 bits of each place, then the 4 upper ones, and then the values."""
        chunks, length, k, padded = self._chosen(x.size)
        x = jnp.pad(x.astype(jnp.float32), (0, chunks * length - x.size))
        rows = x.reshape(chunks, length)
        # NaN counts as the largest magnitude, so that it is sent. The magnitudes are
        # floats because XLA:CPU sorts the whole vector for any other dtype.
        magnitude = jnp.where(jnp.isnan(rows), jnp.inf, jnp.abs(rows))
        _, chosen = lax.top_k(magnitude, k)
        unused = (0, padded - chunks * k)
        values = jnp.take_along_axis(rows, chosen, axis=1).reshape(-1)
        sent, state = self.values.encode(jnp.pad(values, unused), state)
        places = jnp.pad(chosen.reshape(-1), unused)
        low, high = ((places >> shift).astype(jnp.uint8) for shift in (0, 8))
        packed = from_words(jnp.concatenate([low, pack(high, 4)]), sent.dtype)
        return jnp.concatenate([packed, sent]), state

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        chunks, length, k, padded = self._chosen(n)
        split = padded * 12 // 8 // payload.dtype.itemsize
        values = self.values.decode(payload[split:], padded)
        low, high = jnp.split(to_words(payload[:split]), [padded])
        places = low.astype(jnp.int32) + (unpack(high, 4).astype(jnp.int32) << 8)
        places, values = (x[: chunks * k].reshape(chunks, k) for x in (places, values))
        rows = jnp.arange(chunks, dtype=jnp.int32)[:, None]
        zeros = jnp.zeros((chunks, length), jnp.float32)
        return zeros.at[rows, places].set(values).reshape(-1)[:n]

    def _chosen(self, n: int) -> Chosen:
        chunks = -(-n // self.chunk)
        length = -(-n // chunks)
        k = count(self.k, length)
        _check_indices(chunks * k)
        # With a multiple of 8, the places fill whole words of every width.
        whole = math.lcm(8, self.values.multiple)
        return Chosen(chunks, length, k, -(-chunks * k // whole) * whole)


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
        return 4 * (1 + self._parts(n))  # the seed of the draw, and the values

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Returns the seed from which the draw follows, and then the drawn values."""
        seed = self._seed(state)
        drawn = self.project(x.astype(jnp.float32), state, ())
        values = to_words(drawn, jnp.uint32)
        return jnp.concatenate([seed[None], values]), self._next(state)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        return self._placed(payload[0], from_words(payload[1:], jnp.float32), n)

    def round_sizes(self, n: int) -> tuple[int, ...]:
        return (self._parts(n),)

    def _parts(self, n: int) -> int:
        """Returns the number of parts that hold an element."""
        return -(-n // self._strata(n))

    def _strata(self, n: int) -> int:
        """Returns the number of elements of a part, of which one is drawn."""
        return -(-n // count(self.k, n)) if n else 1

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Returns the drawn values, all of them NaN if any element is not finite."""
        del sums
        x: jax.Array = leaves
        k, strata = self._parts(x.size), self._strata(x.size)
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
        k, strata = values.size, self._strata(n)
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


BF16 = Cast("bfloat16")


def top_k(k: int | float, values: Codec = BF16, chunk: int = 4096) -> TopK:
    r"""Returns a codec that sends the elements of largest magnitude of each chunk.

    1. The vector of n elements is divided into the least number of chunks of equal
       length of which none is longer than `chunk`. The last one is padded with zeros.
    2. The k elements of largest magnitude of each chunk are sent, and all others decode
       to zero. Vectors up to `chunk` have a single chunk.

    Each element takes 12 bits for its place in the chunk, and the bytes of the codec
    `values` for its value: 3.5 bytes by default. The k largest elements of the whole
    vector would take places of 32 bits and a sort of the whole vector.

    Wrap the codec in `error_feedback`: without it, an element that is never among the
    largest is never sent.

    Args:
      k: The number of elements to send of each chunk, an integer of at least 1, or the
        fraction of elements to send, a float between 0 and 1, which is rounded to at
        least 1 element of each chunk.
      values: The codec of the values that are sent, for example `int8()`.
      chunk: The largest number of elements of a chunk, at most 4096.

    Raises:
      ValueError: If `k`, `values` or `chunk` breaks its rule. When a vector is encoded,
        also if a chunk of it has fewer than `k` elements.

    Examples:
      >>> codec = top_k(1, chunk=3)
      >>> payload, _ = codec.encode(jnp.float32([1, -3, 2, 0.5, 0, 0.25]), ())
      >>> codec.decode(payload, 6)
      Array([ 0. , -3. ,  0. ,  0.5,  0. ,  0. ], dtype=float32)

      Of a million elements, a hundredth are sent, 41 of each chunk of 4,082:

      >>> top_k(0.01).size(1_000_000)  # bytes
      35168

    References:
      Stich et al., Sparsified SGD with Memory, NeurIPS 2018,
      https://arxiv.org/abs/1809.07599
    """
    if not is_integer(chunk, 1) or chunk > 4096:
        raise ValueError(
            "`chunk` must be an integer from 1 to 4096, since places in a chunk have 12"
            f" bits; got {chunk!r}."
        )
    return TopK(check_k(k), check_inner("values", values), operator.index(chunk))


def random_k(k: int | float, key: jax.Array, *, scaled: bool = True) -> RandomK:
    r"""Returns a codec that sends at most k elements, drawn at random.

    The codec divides a vector of n elements into parts of equal length

    $$m = \lceil n / k \rceil$$

    and draws one element from each part, so that every element is sent with probability
    `1/m`. There are k parts if m divides n, and fewer if not: half of the elements are
    the most that are sent, unless all are. In contrast to k independent draws, no
    element is sent twice, and nothing needs to be sorted. The last part is padded with
    zeros.

    Each element takes 4 bytes. Its index is not sent, because it follows from a seed
    that takes 4 bytes per vector. `top_k` also sends the places, needs a search, and
    sends the elements that matter most. `random_k` is linear, so it works with `psum`.

    Args:
      k: The largest number of elements to send of each vector that is encoded, an
        integer of at least 1, or a fraction of its elements, a float between 0 and 1,
        which is rounded to at least 1 element. An algorithm that cuts the gradients
        into p pieces sends k elements of each.
      key: A key from `jax.random.key`, the same on all processes.
      scaled: Whether to send `m x` for an element `x`, which makes the expectation of
        the decoded element equal to `x`. Use `scaled=False` with `error_feedback`,
        whose residual would otherwise grow.

    Raises:
      ValueError: If `k`, `key` or `scaled` breaks its rule. When a vector is encoded,
        also if it has fewer than `k` elements.

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
    if not isinstance(scaled, bool):
        raise ValueError(f"`scaled` must be True or False, got {scaled!r}.")
    return RandomK(check_k(k), key, scaled)


def count(k: int | float, n: int) -> int:
    """Returns how many of `n` elements to send, if `k` is a number or a fraction."""
    if isinstance(k, float):
        k = max(1, round(k * n))
        _check_indices(k)
        return k
    if k > n:
        raise ValueError(
            f"`k` must be at most the {n} elements of which it chooses; got {k}."
            " Choose a smaller number, or a fraction such as 0.01."
        )
    return k


def _check_indices(length: int) -> None:
    most = jnp.iinfo(jnp.int32).max
    if length > most:
        raise ValueError(
            f"`codec` must have at most {most:,} elements in the payload, which is as"
            f" many as int32 can index; got {length:,}. Choose an algorithm that"
            " encodes pieces of the gradients, such as pj.collectives.two_shot on more"
            " devices, a smaller `k`, or a codec that does not select elements, such as"
            " pj.codecs.int4()."
        )


def check_k(k: int | float) -> int | float:
    if is_integer(k, 1):
        return int(k)
    if not (isinstance(k, numbers.Real) and 0 < k < 1):
        raise ValueError(
            "`k` must be an integer of at least 1, or a fraction between 0 and 1 such"
            f" as 0.01; got {k!r}."
        )
    return float(k)


def _drawn(seed: jax.Array, k: int, strata: int) -> jax.Array:
    """Draws one place in `[0, strata)` for each of the k parts: int32 `[k]`."""
    return jax.random.randint(key_of(seed), (k,), 0, strata, jnp.int32)

"""The interface `Codec` of all codecs, and its subclass `Linear` for summable payloads.

Payloads are integers because no backend rounds integers or sends them in a wider type,
as XLA:CPU does with bfloat16. A codec rounds a float64 vector to float32 before it
encodes the vector; only the rounds of a linear codec keep float64. `error_feedback`
adds the error of that rounding to its residual.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax._internal.ravel import Shapes


class Codec(abc.ABC):
    """Encodes a floating-point vector as unsigned integers and decodes it again.

    A subclass is a frozen dataclass that implements `size`, `encode` and `decode`. It
    overrides the other methods and properties only where their defaults do not hold.

    A vector that contains NaN or infinity must decode to a vector that contains NaN or
    infinity. The train step can then detect the bad value and skip the update.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class EveryBit(Codec):
      ...     def size(self, n):
      ...         return 4 * n
      ...
      ...     def encode(self, x, state):
      ...         return jax.lax.bitcast_convert_type(x, jnp.uint32), state
      ...
      ...     def decode(self, payload, n):
      ...         return jax.lax.bitcast_convert_type(payload, jnp.float32)
      >>> codec = EveryBit()
      >>> payload, state = codec.encode(jnp.float32([1.5, -2.0]), ())
      >>> payload.dtype, payload.nbytes, codec.decode(payload, 2).tolist()
      (dtype('uint32'), 8, [1.5, -2.0])
    """

    @property
    def multiple(self) -> int:
        """Returns the number that the length of each vector must be a multiple of.

        The default is 1. An algorithm pads its vectors with zeros to such a length.
        """
        return 1

    @property
    def narrow(self) -> bool:
        """Returns whether payloads have the range of float16, which ends at 65,504.

        The default is `False`. Gradients are then divided by their weight before they
        are encoded.
        """
        return False

    @property
    def needs_feedback(self) -> bool:
        """Returns whether training may fail without `error_feedback`.

        The default is `False`, which is right for a codec that rounds each element to
        the nearest level. A codec that drops elements or always rounds in the same
        direction must return `True`, because its losses add up over the steps.
        """
        return False

    @property
    def needs_leaves(self) -> bool:
        """Returns whether the codec must be given whole leaves of the gradients.

        The default is `False`. If it is true, the codec works with the algorithms
        `psum`, `tree` and `parameter_server`. All others cut the vector of gradients.
        """
        return False

    @property
    def rounds(self) -> int:
        """Returns the number of psums that add up payloads without decoding them.

        The default is 0, for payloads that cannot be added up. A codec with at least
        one round is a `Linear`.
        """
        return 0

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "Codec":
        """Returns the codec adapted to the vectors that it is about to encode.

        An algorithm calls this method before all others. The default returns the codec
        itself.

        Args:
          shapes: The shapes of the leaves that a vector holds one after another. `None`
            if a vector is only a piece of the leaves, or if the codec has them.
          dtype: The dtype in which the vectors are summed, float32 or float64.
          devices: Number of devices whose vectors may be added up in a vector.
        """
        del shapes, dtype, devices
        return self

    def leaves(self, x: jax.Array) -> Any:
        """Returns a vector `x`, `[n]`, in the form that the rounds of `Linear` take.

        The form is a pytree whose leaves, concatenated, are the vector: the vector
        itself by default, and arrays in the shapes of the gradients if the codec
        `needs_leaves`.

        Args:
          x: The vector.
        """
        return x

    def init(self, n: int, seed: jax.Array) -> Any:
        """Returns the codec's state before it encodes the first vector.

        The state is a pytree of arrays, by default without leaves. No leaf is a scalar,
        because `shard_map` concatenates the states of the devices along the first axis.

        Args:
          n: The length of the vectors.
          seed: A uint32 scalar. Different seeds give different random numbers.
        """
        del n, seed
        return ()

    @abc.abstractmethod
    def size(self, n: int) -> int:
        """Returns the size in bytes of the payload of a vector of `n` elements."""

    @abc.abstractmethod
    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Encodes a vector.

        Args:
          x: The vector, `[n]`, float32 or float64, where `n` is a multiple of
            `multiple`.
          state: The state that `init` or the previous call of `encode` returned.

        Returns:
          The payload, a vector of unsigned integers of `size(n)` bytes, and the state
          for the next vector.
        """

    @abc.abstractmethod
    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """Returns the decoded vector, float32 `[n]`.

        Args:
          payload: The payload that `encode` returned, on this device or another one.
          n: The length of the vector that was encoded.
        """


class Linear(Codec):
    """A codec whose payloads can be summed over devices without decoding them.

    Encoding is linear in each round:

    $$C(x) + C(y) = C(x + y)$$

    where `C` is the encoder and `x` and `y` are the vectors of two devices. An
    all-reduce with a linear codec runs `rounds` psums. It calls `project` before each
    psum, then `rebuild` to decode the last sum and `settled` for the new state.

    The state must be the same on all devices, because they decode the same sums. An
    algorithm therefore gives all devices the same seed. Only the residual of
    `error_feedback` differs between devices. The rounds take and return vectors in the
    form that `leaves` returns.

    Examples:
      >>> from pipejax import codecs
      >>> codec = codecs.random_k(2, jax.random.key(0), scaled=False)
      >>> state = codec.init(4, jnp.uint32(0))
      >>> x, y = jnp.full(4, 1.0), jnp.full(4, 2.0)
      >>> total = codec.project(x, state, ()) + codec.project(y, state, ())
      >>> sorted(codec.rebuild(state, (total,), 4).tolist())
      [0.0, 0.0, 3.0, 3.0]
    """

    @abc.abstractmethod
    def round_sizes(self, n: int) -> tuple[int, ...]:
        """Returns how many elements a vector of `n` contributes to each round."""

    @abc.abstractmethod
    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Returns the vector that this device contributes to the next round.

        Its length is the number that `round_sizes` returns for the round, and its dtype
        is that of the leaves.

        Args:
          leaves: The vector to encode.
          state: The codec's state.
          sums: The sums over devices of the rounds that have finished, in order.
        """

    @abc.abstractmethod
    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        """Returns the decoded sum of the vectors, linear in the last of `sums`.

        Args:
          state: The state that `project` was given.
          sums: The sums over devices of all rounds, in order.
          n: The length of the encoded vectors.
        """

    @abc.abstractmethod
    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """Returns the state for the next vector.

        Args:
          leaves: The encoded vector.
          state: The state that `project` was given.
          sums: The sums over devices of all rounds, in order.
          own: The vector that this device contributed to the last round.
        """

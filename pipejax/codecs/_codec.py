"""What a codec is.

A codec turns a float32 vector into unsigned integers and back. Integers, because no
backend widens them on the way, as XLA:CPU does with bfloat16, and none rounds them. A
float64 vector is rounded to float32 first; `error_feedback` keeps that error too.

- `cast("float32")`: nothing lost; what "uncompressed" means
- `truncate`, `int8`, `sign`: fewer bits an element
- `top_k`, `random_k`: fewer elements
- `power_sgd`: two thin matrices for a large one; can be summed as they are
- `stochastic`, `error_feedback`: wrappers that repair what rounding and dropping do
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.vectors import Shapes


class Codec(abc.ABC):
    """How a vector travels; subclasses are frozen dataclasses.

    A subclass gives `size`, `encode`, `decode` and `bound`, and says otherwise where
    the defaults here do not hold. A vector with NaN or infinity must decode to one, so
    that a step can be skipped for it.
    """

    @property
    def multiple(self) -> int:
        """Vectors must be a multiple of this long; whoever sends pads with zeros."""
        return 1

    @property
    def unbiased(self) -> bool:
        """Whether `E[decode(encode(x))] = x`, over the codec's own random numbers."""
        return False

    @property
    def needs_feedback(self) -> bool:
        """Whether what is lost adds up, step after step, and training may fail for it.

        So it is with what drops elements or rounds one way, not to the nearest level.
        """
        return False

    @property
    def needs_leaves(self) -> bool:
        """Whether it works on whole leaves, so that no algorithm may cut the vector.

        `psum`, `tree` and `parameter_server` do not; all others do.
        """
        return False

    @property
    def rounds(self) -> int:
        """Psums in which payloads can be added up unread; 0 if they cannot.

        Where there are any, the codec is linear and has `project`, `rebuild` and
        `settled`; see `Linear`.
        """
        return 0

    def of(
        self, shapes: Shapes | None = None, dtype: DTypeLike = jnp.float32
    ) -> "Codec":
        """The codec for certain vectors.

        Args:
          shapes: of the leaves that they hold, one after another; `None` for a part of
            them, or where the codec knows already.
          dtype: in which they are summed, float32 or float64.
        """
        del shapes, dtype
        return self

    def leaves(self, x: jax.Array) -> Any:
        """Returns a vector as the rounds of a linear codec take it; by default itself.

        Returns:
          A pytree whose leaves, one after another, are x: arrays in the shapes of the
          gradients if the codec `needs_leaves`.
        """
        return x

    def init(self, n: int, seed: jax.Array) -> Any:
        """The state before the first vector of n elements: arrays, none of them scalar.

        Args:
          n: elements.
          seed: uint32 scalar; another where random numbers should be others.

        Returns:
          A pytree; one without leaves if the codec has no state.
        """
        del n, seed
        return ()

    @abc.abstractmethod
    def size(self, n: int) -> int:
        """Bytes of the payload of n elements."""

    @abc.abstractmethod
    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """x [n] to the payload, unsigned integers of `size(n)` bytes in all.

        Args:
          x: float32, or float64, which travels as float32.
          state: what `init` or the call before returned.

        Returns:
          The payload, and the state for the next vector.
        """

    @abc.abstractmethod
    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """The payload of n elements to float32 [n]."""

    @abc.abstractmethod
    def bound(self, x: jax.Array) -> jax.Array:
        """The largest `|decode(encode(x)) - x|` there can be: [n], or a scalar.

        Args:
          x: float32 [n].
        """


class Linear(Codec):
    """A codec whose payloads can be summed: `C(x) + C(y) = C(x + y)`, round by round.

    All devices must have the same state, so none is seeded by its rank. The rounds take
    and return what `leaves` returns: a vector, or arrays in the gradients' own shapes.
    """

    @abc.abstractmethod
    def round_sizes(self, n: int) -> tuple[int, ...]:
        """Elements that a device adds in each round, in the dtype of the leaves."""

    @abc.abstractmethod
    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """What this device adds in the next round, given the sums of those before."""

    @abc.abstractmethod
    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        """Leaves of a vector [n] from the sums of all rounds; linear in the last."""

    @abc.abstractmethod
    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """The state for the next vector; `own` is what this device added last."""

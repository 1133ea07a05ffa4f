"""ACP-SGD: PowerSGD that sends only one of its two thin matrices in each step.

Half a step of the power method is done in each training step. The matrix that is not
sent is known to all devices from the step before.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.bits import to_words
from pipejax._internal.ravel import ravel

from ._orthonormal import orthonormal, product, restarted
from ._power_sgd import PowerSGD, Sides, power_sgd, total


class AlternatingState(NamedTuple):
    turn: jax.Array  # uint32 `[1]`: 0 if `P` is sent next, and 1 if `Q` is
    p: jax.Array  # all matrices `P`, one after another
    q: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class AlternatingPowerSGD(PowerSGD):
    """Sends `P` and `Q` in turn; see `acp_sgd`."""

    rounds = 1  # sums `P` or `Q`, and all other leaves

    def init(self, n: int, seed: jax.Array) -> AlternatingState:
        q = super().init(n, seed)
        key = jax.random.fold_in(jax.random.fold_in(self.key, seed), 1)
        p = jax.random.normal(key, (self.rank * total(self._rows()),), jnp.float32)
        return AlternatingState(jnp.zeros(1, jnp.uint32), p, q)

    def size(self, n: int) -> int:
        return 4 * sum(super().round_sizes(n))

    def round_sizes(self, n: int) -> tuple[int, ...]:
        # Programs have vectors of fixed lengths.
        p, q_and_rest = super().round_sizes(n)
        q = self.rank * total(self._columns())
        return (max(p, q) + q_and_rest - q,)

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Returns `P` and `Q`, since a receiver need not know either, and the rest."""
        leaves = self.leaves(x.astype(jnp.float32))
        total = self.project(leaves, state, ())
        columns, last = self._factors(state, total)
        payload = to_words(ravel([*columns, last]), jnp.uint32)
        return payload, self.settled(leaves, state, (total,), total)

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Returns `M Q` or `M^T P`, padded to the longer of both, and other leaves."""
        del sums
        matrices, rest = self._parted(leaves)
        dtype = leaves[0].dtype if leaves else state.p.dtype

        def factor(turn: int) -> jax.Array:
            kept = self._kept(state, turn, dtype)
            pairs = zip(matrices, kept, strict=True)
            found = [product(k.mT, m).mT if turn else product(m, k) for m, k in pairs]
            vector = ravel(found) if found else jnp.zeros(0, dtype)
            return jnp.pad(vector, (0, self._side() - vector.size))

        is_p = state.turn[0] == 0
        sent = lax.cond(is_p, lambda: factor(0), lambda: factor(1))
        return ravel([sent, *rest])

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        return self._product(*self._factors(state, sums[0]), n)

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """Returns the matrices with the ones that were sent in place of the old."""
        del leaves, own
        found = []
        for turn, (old, sides) in enumerate(self._factors_of(state)):
            pairs = zip(self._cut(sums[0], sides), self._cut(old, sides), strict=True)
            new = ravel([restarted(n.astype(o.dtype), o) for n, o in pairs])
            found.append(jnp.where(state.turn == turn, new, old) if sides else old)
        return AlternatingState(1 - state.turn, *found)

    def _factors_of(self, state: AlternatingState) -> list[tuple[jax.Array, Sides]]:
        return [(state.p, self._rows()), (state.q, self._columns())]

    def _kept(self, state: Any, turn: int, dtype: Any) -> list[jax.Array]:
        """Returns what is not sent in this turn, `Q` or `P`, made orthonormal."""
        kept, sides = self._factors_of(state)[1 - turn]
        return orthonormal(self._cut(kept.astype(dtype), sides))

    def _factors(
        self, state: Any, total: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Returns every `P`, and `Q` with the other leaves as one vector."""
        factors = []
        for turn, (_, sides) in enumerate(self._factors_of(state)):
            pairs = zip(
                self._cut(total, sides),
                self._kept(state, 1 - turn, total.dtype),
                strict=True,
            )
            sent = state.turn[0] == turn
            factors.append([jnp.where(sent, new, kept) for new, kept in pairs])
        columns, rows = factors
        return columns, ravel([*(x.reshape(-1) for x in rows), total[self._side() :]])

    def _side(self) -> int:
        """Returns the number of elements that are sent for all matrices together."""
        return self.rank * max(total(self._rows()), total(self._columns()))


def acp_sgd(
    rank: int, key: jax.Array, *, layers: int | None = None
) -> AlternatingPowerSGD:
    r"""Returns a codec that sends one of the two matrices of PowerSGD in each step.

    Leaves are treated as matrices `M`, as in `power_sgd`. In even steps, the codec

    1. makes the columns of `Q` orthonormal
    2. sums `P = M Q` over devices
    3. approximates the sum of the gradients by

       $$\sum_i M_i \approx P Q^T$$

    In odd steps, `P` and `Q` swap their roles: the columns of `P` are made orthonormal,
    `Q = M^T P` is summed, and the approximation is the same product.

    `power_sgd` sums `P` and then `Q` in each step. `acp_sgd` needs one collective in
    place of two, the second of which waits for the first. It sends half of the bytes if
    all matrices together have as many rows as columns: `4 r max(m, n)` in place of
    `4 r (m + n)` bytes. In return, it takes twice as many steps to find the largest
    directions of the gradients.

    Wrap the codec in `error_feedback`. Like `power_sgd`, it needs whole leaves. The
    bytes are saved only with `psum`. In `tree` and `parameter_server`, the payload has
    both matrices, because a receiver does not know the other one.

    Args:
      rank: The rank `r`, an integer of at least 1.
      key: A key from `jax.random.key`, for the random matrices of the first steps. It
        must be the same on all processes.
      layers: As for `power_sgd`.

    Raises:
      ValueError: As for `power_sgd`.

    Examples:
      The elements that each round sums for a matrix of 64 x 64:

      >>> for make in (power_sgd, acp_sgd):
      ...     codec = make(4, jax.random.key(0)).of(((64, 64),))
      ...     print(codec.round_sizes(64 * 64))
      (256, 256)
      (256,)

    References:
      Zhang et al., Evaluation and Optimization of Gradient Compression, ICDCS 2023,
      https://arxiv.org/abs/2306.08881
    """
    checked = power_sgd(rank, key, layers=layers)
    return AlternatingPowerSGD(checked.rank, checked.key, layers=layers)

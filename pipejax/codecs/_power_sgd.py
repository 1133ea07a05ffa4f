"""PowerSGD: a matrix of m x n travels as two of r columns.

With M this device's gradient, Q what the step before left behind:

1. `P = M Q`, summed over devices, its columns made orthonormal
2. `Q = M^T P`, summed over devices; the result is `P Q^T`

That is one step of the power method a training step, and since Q is kept, the columns
turn to M's largest singular vectors as training goes on. Both products are linear in M,
so the sums are those of all devices' gradients.

Reference: Vogels et al. 2019, https://arxiv.org/abs/1905.13727
"""

import dataclasses
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.bits import from_words, to_words
from pipejax.integers import is_integer
from pipejax.vectors import Shapes, apart, joined

from ._codec import Linear
from ._rounding import check_key


@dataclasses.dataclass(frozen=True, eq=False)
class PowerSGD(Linear):
    """See `power_sgd`."""

    rank: int
    key: jax.Array
    shapes: Shapes | None = None

    @property
    def needs_feedback(self) -> bool:
        """All but r directions are dropped."""
        return True

    @property
    def needs_leaves(self) -> bool:
        """The matrices."""
        return True

    @property
    def rounds(self) -> int:
        """Two: P, then Q and all that is no matrix."""
        return 2

    def of(
        self, shapes: Shapes | None = None, dtype: DTypeLike = jnp.float32
    ) -> "PowerSGD":
        """The same for these leaves; as it is if they are not given."""
        del dtype
        return self if shapes is None else dataclasses.replace(self, shapes=shapes)

    def init(self, n: int, seed: jax.Array) -> Any:
        """Q of every matrix, at random."""
        self._forms(n)
        length = self.rank * sum(n for _, n in self._matrices())
        key = jax.random.fold_in(self.key, seed)
        return jax.random.normal(key, (length,), jnp.float32)

    def size(self, n: int) -> int:
        """`4 r (m + n)` bytes a matrix, 4 an element of the rest."""
        return 4 * sum(self.round_sizes(n))

    def round_sizes(self, n: int) -> tuple[int, ...]:
        """P; then Q and the rest."""
        self._forms(n)
        matrices = self._matrices()
        rest = n - sum(rows * columns for rows, columns in matrices)
        return (
            self.rank * sum(rows for rows, _ in matrices),
            self.rank * sum(columns for _, columns in matrices) + rest,
        )

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """P made orthonormal, then Q and the rest; as if this were the only device."""
        leaves = self.leaves(x.astype(jnp.float32))
        first = self.project(leaves, state, ())
        last = self.project(leaves, state, (first,))
        columns = [p.reshape(-1) for p in self._orthonormal(first)]
        payload = to_words(joined([*columns, last]), jnp.uint32)
        return payload, self.settled(leaves, state, (first, last), last)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """`P Q^T`, and the rest."""
        numbers = from_words(payload, jnp.float32)
        split = self.rank * sum(m for m, _ in self._matrices())
        columns = self._cut(numbers[:split], [m for m, _ in self._matrices()])
        return joined(self._product(columns, numbers[split:], n))

    def bound(self, x: jax.Array) -> jax.Array:
        """The norm of the matrix an element is in; nothing for the rest."""
        bounds = []
        for leaf in self.leaves(x):
            norm = jnp.zeros((), x.dtype)
            if self._is_coded(leaf.shape):
                unit, largest = _scaled(leaf.reshape(-1))
                norm = jnp.linalg.norm(unit) * (1 + 1e-4) * largest
                # What the products add up may overflow.
                norm = jnp.where(jnp.isfinite(largest * unit.size), norm, jnp.inf)
            bounds.append(jnp.full(leaf.size, norm))
        return joined(bounds)

    def leaves(self, x: jax.Array) -> Any:
        """The gradients in their own shapes."""
        return apart(x, self._forms(x.size, x.dtype))

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """`M Q`; then `M^T P`, and the rest."""
        coded = [x for x in leaves if self._is_coded(x.shape)]
        matrices = [x.reshape(_sides(x.shape)) for x in coded]
        if not sums:
            start = self._cut(state, [n for _, n in self._matrices()])
            pairs = zip(matrices, start, strict=True)
            return joined([m @ q.astype(m.dtype) for m, q in pairs])
        columns = self._orthonormal(sums[0])
        # Not `m.T @ p`, which XLA:CPU does far slower for one column.
        products = [(p.T @ m).T for m, p in zip(matrices, columns, strict=True)]
        rest = [x for x in leaves if not self._is_coded(x.shape)]
        return joined([*products, *rest])

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        """`P Q^T`, and the rest."""
        del state
        return self._product(self._orthonormal(sums[0]), sums[1], n)

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """Q, to start from; of a column that came to nothing, as it was before."""
        del leaves, own
        sides = [n for _, n in self._matrices()]
        last = sums[1][: state.size].astype(state.dtype)
        new, old = self._cut(last, sides), self._cut(state, sides)
        return joined([_restarted(n, o) for n, o in zip(new, old, strict=True)])

    def _product(self, columns: list[jax.Array], last: jax.Array, n: int) -> Any:
        sides = [n for _, n in self._matrices()]
        split = self.rank * sum(sides)
        rows = self._cut(last[:split], sides)
        products = iter([p @ q.T for p, q in zip(columns, rows, strict=True)])
        forms = self._forms(n, last.dtype)
        rest = iter(
            apart(last[split:], [x for x in forms if not self._is_coded(x.shape)])
        )
        return tuple(
            next(products).reshape(x.shape) if self._is_coded(x.shape) else next(rest)
            for x in forms
        )

    def _orthonormal(self, first: jax.Array) -> list[jax.Array]:
        sides = [m for m, _ in self._matrices()]
        return [orthonormal(p) for p in self._cut(first, sides)]

    def _cut(self, numbers: jax.Array, sides: list[int]) -> list[jax.Array]:
        """A vector as matrices of these heights and r columns."""
        ends = itertools.accumulate(self.rank * side for side in sides)
        return [
            numbers[end - self.rank * side : end].reshape(side, self.rank)
            for end, side in zip(ends, sides, strict=True)
        ]

    def _matrices(self) -> list[tuple[int, int]]:
        return [_sides(shape) for shape in self._shapes() if self._is_coded(shape)]

    def _is_coded(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a matrix, and sending r columns of either side saves."""
        m, n = _sides(shape)
        return len(shape) > 1 and self.rank * (m + n) < m * n

    def _forms(
        self, n: int, dtype: DTypeLike = jnp.float32
    ) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the leaves of a vector of n elements."""
        forms = [jax.ShapeDtypeStruct(x or (1,), dtype) for x in self._shapes()]
        if (total := sum(map(math.prod, self._shapes()))) != n:
            raise ValueError(
                f"`power_sgd` must be given whole leaves, {total} elements; got a"
                f" vector of {n}. Choose an algorithm that does not cut vectors:"
                " pj.collectives.psum, tree or parameter_server."
            )
        return forms

    def _shapes(self) -> Shapes:
        if self.shapes is None:
            raise ValueError(
                "`power_sgd` must know the shapes of the leaves, got none. Choose an"
                " algorithm that does not cut vectors: pj.collectives.psum, tree or"
                " parameter_server; or call `codec.of(shapes)`."
            )
        return self.shapes


def power_sgd(rank: int, key: jax.Array) -> PowerSGD:
    """Rank-r matrices in place of gradients, improved from step to step.

    A leaf of shape (a, b, ..., n) is a matrix of `m = a b ...` rows. One that would
    not shrink, `r (m + n) >= m n`, and every vector travel as they are.

    Args:
      rank: r, at least 1.
      key: from `jax.random.key`, for the first Q.

    Raises:
      ValueError: for a rank below 1, or what is no key; in use, under an algorithm that
        cuts vectors into parts.
    """
    if not is_integer(rank, 1):
        raise ValueError(
            f"`rank` must be an integer of at least 1, got {rank!r}. 1, 2 and 4 are"
            " usual."
        )
    check_key(key)
    return PowerSGD(operator.index(rank), key)


def orthonormal(columns: jax.Array) -> jax.Array:
    """Gram-Schmidt, [m, r] to [m, r]; a column that depends on others becomes zero."""
    done: list[jax.Array] = []
    for i in range(columns.shape[1]):
        column, _ = _scaled(columns[:, i])
        length = jnp.linalg.norm(column)
        for _ in range(2):  # once more, against what rounding has left
            for other in done:
                column = column - jnp.vdot(other, column) * other
        norm = jnp.linalg.norm(column)
        kept = norm > 1e-5 * length
        # Of NaN neither holds, and it stays.
        gone = norm <= 1e-5 * length
        column = column / jnp.where(kept, norm, jnp.where(gone, 1.0, norm))
        done.append(jnp.where(gone, 0.0, column))
    return jnp.stack(done, axis=1)


def _scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x over its largest magnitude, whose square may be no float32; and that."""
    largest = jnp.max(jnp.abs(x), initial=0.0)
    largest = jnp.where(largest == 0, 1.0, largest)
    return x / largest, largest


def _restarted(new: jax.Array, old: jax.Array) -> jax.Array:
    """Columns of order 1; as before, what would stay zeros, or not finite, for ever."""
    largest = jnp.max(jnp.abs(new), axis=0, keepdims=True)
    good = jnp.isfinite(new).all(axis=0, keepdims=True) & (largest > 0)
    return jnp.where(good, new / jnp.where(good, largest, 1.0), old)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1] if shape else 1

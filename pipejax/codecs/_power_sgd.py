"""PowerSGD: a codec that sends two thin matrices in place of each gradient matrix.

Both products of `power_sgd` are linear in the gradient, so the result is the same as
for the sum of all gradients on a single device. Each training step does one step of the
power method. Because `Q` is kept, the columns of `P` and `Q` turn towards the largest
singular vectors of the gradient in the course of training.
"""

import collections
import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax._internal.bits import from_words, to_words
from pipejax._internal.integers import is_integer
from pipejax._internal.ravel import Shapes, ravel, unravel

from ._codec import Linear
from ._orthonormal import orthonormal, product, restarted
from ._rounding import check_key

# The rows or columns of every matrix, each after the length of its stack, if any.
Sides = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class PowerSGD(Linear):
    """Sends low-rank matrices; see `power_sgd`.

    The state is a float32 vector of all matrices `Q`, one after another. `shapes` are
    those of the leaves that a vector holds, or `None` as long as they are not known.
    Leaves that stack layers are stacks of matrices, with a leading axis everywhere.
    """

    needs_feedback = True  # all but `rank` directions are dropped
    needs_leaves = True
    rounds = 2  # the first sums `P`, the second `Q` and all other leaves

    rank: int
    key: jax.Array
    shapes: Shapes | None = None
    layers: int | None = None

    def of(
        self,
        shapes: Shapes | None = None,
        dtype: DTypeLike = jnp.float32,
        devices: int = 1,
    ) -> "PowerSGD":
        del dtype, devices
        return self if shapes is None else dataclasses.replace(self, shapes=shapes)

    def init(self, n: int, seed: jax.Array) -> Any:
        self._forms(n)
        length = self.rank * total(self._columns())
        key = jax.random.fold_in(self.key, seed)
        return jax.random.normal(key, (length,), jnp.float32)

    def size(self, n: int) -> int:
        return 4 * sum(self.round_sizes(n))

    def round_sizes(self, n: int) -> tuple[int, ...]:
        # A plan is for up to ten million leaves, of which most have the same shape.
        shapes = collections.Counter(self._shapes())
        self._check_total(n, shapes)
        coded = [(self._matrices(s), k) for s, k in shapes.items() if self._is_coded(s)]
        rest = n - sum(math.prod(form) * k for form, k in coded)
        rows = sum(math.prod(form[:-1]) * k for form, k in coded)
        columns = sum(math.prod((*form[:-2], form[-1])) * k for form, k in coded)
        return self.rank * rows, self.rank * columns + rest

    def encode(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Runs both rounds on this device; returns `P`, `Q` and the other leaves."""
        leaves = self.leaves(x.astype(jnp.float32))
        first = self.project(leaves, state, ())
        last = self.project(leaves, state, (first,))
        # The payload has orthonormal columns, so that `decode` need not make them so
        # again.
        columns = [p.reshape(-1) for p in self._orthonormal(first)]
        payload = to_words(ravel([*columns, last]), jnp.uint32)
        return payload, self.settled(leaves, state, (first, last), last)

    def decode(self, payload: jax.Array, n: int) -> jax.Array:
        """Returns `P Q^T` for every matrix, and the other leaves as they were sent."""
        numbers = from_words(payload, jnp.float32)
        columns = self._cut(numbers, self._rows())
        split = self.rank * total(self._rows())
        return ravel(self._product(columns, numbers[split:], n))

    def leaves(self, x: jax.Array) -> Any:
        return unravel(x, self._forms(x.size, x.dtype))

    def project(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Returns `M Q` in round 1, and `M^T P` with the other leaves in round 2."""
        matrices, rest = self._parted(leaves)
        if not sums:
            pairs = zip(matrices, self._cut(state, self._columns()), strict=True)
            return ravel([product(m, q.astype(m.dtype)) for m, q in pairs])
        pairs = zip(matrices, self._orthonormal(sums[0]), strict=True)
        # XLA:CPU is far slower at `m.T @ p` if p has a single column.
        products = [product(p.mT, m).mT for m, p in pairs]
        # All other leaves travel in this round, and need no collective of their own.
        return ravel([*products, *rest])

    def rebuild(self, state: Any, sums: tuple[jax.Array, ...], n: int) -> Any:
        del state
        return self._product(self._orthonormal(sums[0]), sums[1], n)

    def settled(
        self, leaves: Any, state: Any, sums: tuple[jax.Array, ...], own: jax.Array
    ) -> Any:
        """Returns the new `Q`; columns that are zero or not finite keep the old one."""
        del leaves, own
        # The sum begins with every new `Q`, in the layout of the state.
        new = self._cut(sums[1].astype(state.dtype), self._columns())
        old = self._cut(state, self._columns())
        return ravel([restarted(n, o) for n, o in zip(new, old, strict=True)])

    def _product(self, columns: Sequence[jax.Array], last: jax.Array, n: int) -> Any:
        """Returns the leaves that follow from every `P` and the last round's sum."""
        rows = self._cut(last, self._columns())
        products = iter([product(p, q.mT) for p, q in zip(columns, rows, strict=True)])
        # `last` has every `Q`, followed by all elements that are in no matrix.
        left = last[self.rank * total(self._columns()) :]
        forms = self._forms(n, last.dtype)
        rest = iter(unravel(left, [x for x in forms if not self._is_coded(x.shape)]))
        return tuple(
            next(products).reshape(x.shape) if self._is_coded(x.shape) else next(rest)
            for x in forms
        )

    def _orthonormal(self, first: jax.Array) -> list[jax.Array]:
        return orthonormal(self._cut(first, self._rows()))

    def _cut(self, numbers: jax.Array, sides: Sides) -> tuple[jax.Array, ...]:
        """Cuts the beginning of a vector into matrices of `[*side, rank]`."""
        shapes = ((*side, self.rank) for side in sides)
        return unravel(
            numbers, [jax.ShapeDtypeStruct(each, numbers.dtype) for each in shapes]
        )

    def _parted(self, leaves: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the leaves that are sent as matrices, in this form, and the others.

        This is also their order in what is sent.
        """
        coded = [x for x in leaves if self._is_coded(x.shape)]
        rest = [x for x in leaves if not self._is_coded(x.shape)]
        return [x.reshape(self._matrices(x.shape)) for x in coded], rest

    def _rows(self) -> Sides:
        return [(*stack, m) for *stack, m, _ in self._coded()]

    def _columns(self) -> Sides:
        return [(*stack, n) for *stack, _, n in self._coded()]

    def _coded(self) -> list[tuple[int, ...]]:
        return [self._matrices(x) for x in self._shapes() if self._is_coded(x)]

    def _is_coded(self, shape: tuple[int, ...]) -> bool:
        """Returns whether `P` and `Q` take fewer bytes than the leaf."""
        *_, m, n = self._matrices(shape)
        return self.rank * (m + n) < m * n

    def _matrices(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a leaf's shape as a matrix, or as a stack of one for each layer."""
        stacked = self.layers is not None and shape[:1] == (self.layers,)
        stack, sides = (shape[:1], shape[1:]) if stacked else ((), shape)
        cuts = range(len(sides) - 1, 0, -1)
        forms = [(math.prod(sides[:i]), math.prod(sides[i:])) for i in cuts]
        return (*stack, *min(forms, key=sum, default=(math.prod(sides), 1)))

    def _forms(
        self, n: int, dtype: DTypeLike = jnp.float32
    ) -> list[jax.ShapeDtypeStruct]:
        self._check_total(n, collections.Counter(self._shapes()))
        return [jax.ShapeDtypeStruct(x or (1,), dtype) for x in self._shapes()]

    def _check_total(self, n: int, shapes: Mapping[tuple[int, ...], int]) -> None:
        if (whole := sum(math.prod(x) * k for x, k in shapes.items())) != n:
            raise ValueError(
                f"`power_sgd` must be given whole leaves, {whole} elements; got a"
                f" vector of {n}. Choose an algorithm that does not cut vectors:"
                " pj.collectives.psum, tree or parameter_server."
            )

    def _shapes(self) -> Shapes:
        if self.shapes is None:
            raise ValueError(
                "`power_sgd` must know the shapes of the leaves; got none. Choose an"
                " algorithm that does not cut vectors: pj.collectives.psum, tree or"
                " parameter_server, and not inside `hierarchical`; or call"
                " `codec.of(shapes)`."
            )
        return self.shapes


def power_sgd(rank: int, key: jax.Array, *, layers: int | None = None) -> PowerSGD:
    r"""Returns a codec that sends a low-rank approximation of each gradient matrix.

    A leaf of two or more axes is treated as a matrix `M` of m rows and n columns. Its
    first axes together are the rows, and the others the columns. Where they part,
    `m + n` is least: an attention kernel of `(768, 12, 64)` is a matrix of 768 x 768,
    and a convolution kernel of `(3, 3, 64, 128)` one of 576 x 128. Each step, with `Q`
    from the step before,

    1. sums `M Q` over devices and makes the columns orthonormal, which gives `P`
    2. sums `M^T P` over devices, which gives the new `Q`
    3. approximates the sum of the gradients:

       $$\sum_i M_i \approx P Q^T$$

    where `M_i` is the gradient of device i. `P` has shape `[m, r]` and `Q` has shape
    `[n, r]`, so that a matrix takes `4 r (m + n)` bytes. Vectors are sent uncompressed,
    and so are matrices that would not become smaller, which have `r (m + n) >= m n`.

    Wrap the codec in `error_feedback`, because each step drops all but r directions.
    Like `random_k`, the codec is linear. It needs whole leaves, so that it works only
    with the algorithms `psum`, `tree` and `parameter_server`, which tell it the shapes.
    Without an algorithm, call its method `of(shapes)`.

    Args:
      rank: The rank `r`, an integer of at least 1.
      key: A key from `jax.random.key`, for the random `Q` of the first step. It must be
        the same on all processes.
      layers: Number of layers of a model that runs them in a loop, with `nnx.scan`,
        `nn.scan` or `jax.lax.scan`. Each layer of a leaf whose first axis has this
        length is then a matrix of its own. Without it, all layers share `r` directions.
        If a group shards that axis, give the length that a device holds.

    Raises:
      ValueError: If `rank`, `key` or `layers` breaks its rule. When a vector is
        encoded, also if the algorithm cuts it into pieces.

    Examples:
      A 4 x 6 matrix of rank 1 is sent in 40 bytes, in place of 96, without loss:

      >>> codec = power_sgd(1, jax.random.key(0)).of(((4, 6),))
      >>> x = jnp.outer(jnp.arange(4.0), jnp.arange(6.0)).reshape(-1)
      >>> payload, state = codec.encode(x, codec.init(24, jnp.uint32(0)))
      >>> payload.nbytes, bool(jnp.allclose(codec.decode(payload, 24), x, atol=1e-4))
      (40, True)

    References:
      Vogels et al., PowerSGD, NeurIPS 2019, https://arxiv.org/abs/1905.13727
    """
    if not is_integer(rank, 1):
        raise ValueError(
            f"`rank` must be an integer of at least 1; got {rank!r}. Ranks of 1, 2 and"
            " 4 are usual."
        )
    check_key(key)
    if layers is not None and not is_integer(layers, 1):
        raise ValueError(
            "`layers` must be the length of the first axis of stacked layers, an"
            f" integer of at least 1, or None without any; got {layers!r}."
        )
    return PowerSGD(operator.index(rank), key, layers=layers)


def total(sides: Sides) -> int:
    """Returns the number of rows, or of columns, of all matrices together."""
    return sum(map(math.prod, sides))

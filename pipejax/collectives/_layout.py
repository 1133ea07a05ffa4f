"""Layouts: what one device has to sum, as arrays and as vectors."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax._internal.mesh import AxisName
from pipejax._internal.ranges import sum_dtype
from pipejax._internal.ravel import Shapes, ravel, unravel, working_dtype


class Summands(NamedTuple):
    """The arrays that one device contributes to a sum, or their sums over devices.

    Attributes:
      coded: Arrays that a codec may compress: gradients.
      exact: Arrays that always travel exactly: loss, metrics and changes of model
        state.
    """

    coded: tuple[Any, ...]
    exact: tuple[Any, ...] = ()


class Layout(NamedTuple):
    """Shapes and dtypes of the arrays that one device contributes to a sum.

    An `AllReduce` is called with a layout and returns the stages that sum arrays of
    this layout. `Summands` holds the arrays themselves.

    Attributes:
      coded: Shapes and dtypes, as `jax.ShapeDtypeStruct`s, of the arrays that a codec
        may compress.
      exact: Shapes and dtypes of the arrays that always travel exactly.
      whole: Whether `coded` describes whole gradients. If it is false, `coded`
        describes a piece of the vector of gradients.
      over: All mesh axes of the sum, for an algorithm that sums over some of them at a
        time. `None` stands for the axes that the algorithm is called with.
      drawn: The mesh axes along which devices draw different random numbers. `None`
        stands for `over`.
    """

    coded: tuple[jax.ShapeDtypeStruct, ...]
    exact: tuple[jax.ShapeDtypeStruct, ...] = ()
    whole: bool = True
    over: AxisName | None = None
    drawn: AxisName | None = None

    @classmethod
    def of(cls, summands: Summands) -> "Layout":
        """Returns the layout of arrays, or of anything that has a shape and a dtype."""
        return cls(*jax.tree.map(_form, summands))

    @classmethod
    def of_shapes(
        cls, shapes: Shapes, dtype: DTypeLike = jnp.float32, *, exact: int = 0
    ) -> "Layout":
        """Returns the layout of arrays of one dtype and at most one exact vector.

        Args:
          shapes: Shapes of the arrays that a codec may compress.
          dtype: dtype of all arrays.
          exact: Number of elements of the vector that travels exactly. With 0 there is
            no such vector.

        Examples:
          >>> from pipejax.collectives import Layout
          >>> layout = Layout.of_shapes(((2, 3), (4,)), "bfloat16", exact=1)
          >>> layout.coded_size, layout.exact_size, layout.working_dtype
          (10, 1, dtype('float32'))
        """
        coded = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        return cls(coded, (jax.ShapeDtypeStruct((exact,), dtype),) if exact else ())

    @property
    def shapes(self) -> Shapes | None:
        """Returns the shapes of the arrays that a codec may compress.

        It is `None` for a piece of a vector, which a codec of whole gradients cannot
        encode.
        """
        return tuple(tuple(x.shape) for x in self.coded) if self.whole else None

    @property
    def coded_size(self) -> int:
        """Returns the number of elements that a codec may compress."""
        return sum(math.prod(x.shape) for x in self.coded)

    @property
    def exact_size(self) -> int:
        """Returns the number of elements that always travel exactly."""
        return sum(math.prod(x.shape) for x in self.exact)

    @property
    def working_dtype(self) -> np.dtype:
        """Returns the dtype of vectors, float64 if any array is and else float32."""
        dtypes = {working_dtype(x.dtype) for x in (*self.coded, *self.exact)}
        return max(dtypes, key=lambda dtype: dtype.itemsize, default=np.dtype("f4"))

    def vectors(
        self, summands: Summands, sizes: tuple[int, int] | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns coded and exact elements as two vectors of `working_dtype`.

        Args:
          summands: Arrays of this layout.
          sizes: The sizes of both vectors, which zeros at their ends fill up. By
            default, there are no such zeros.
        """
        coded, exact = sizes or (None, None)
        dtype = self.working_dtype
        return ravel(summands.coded, dtype, coded), ravel(summands.exact, dtype, exact)

    def arrays(self, coded: jax.Array, exact: jax.Array) -> Summands:
        """Returns the arrays whose `vectors` these are, each in the dtype of its sum.

        A float16 array has a float32 sum, and all others keep their dtypes; see
        `pipejax._internal.ranges`.

        Args:
          coded: At least `coded_size` elements. The rest is ignored.
          exact: At least `exact_size` elements. The rest is ignored.
        """
        sums = self.sums()
        return Summands(unravel(coded, sums.coded), unravel(exact, sums.exact))

    def sums(self) -> "Layout":
        """Returns the layout of the sums of arrays of this layout."""

        def form(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype))

        coded, exact = tuple(map(form, self.coded)), tuple(map(form, self.exact))
        return self._replace(coded=coded, exact=exact)


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

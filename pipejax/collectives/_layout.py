"""What one device has to sum: arrays, and the vectors in which algorithms cut them.

Gradients are summed in the shapes of the parameters. An algorithm that cuts its input
into pieces makes two vectors of them, of what a codec may compress and of what it may
not, and takes the sums apart again.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.mesh import AxisName
from pipejax.vectors import Shapes, apart, joined, working_dtype


class Summands(NamedTuple):
    """Arrays of one device, or their sums over devices.

    Attributes:
      coded: arrays that a codec may compress: gradients.
      exact: arrays that travel as they are: loss, metrics, changes of model state.
    """

    coded: tuple[Any, ...]
    exact: tuple[Any, ...] = ()


class Layout(NamedTuple):
    """Shapes and dtypes of what is summed.

    Attributes:
      coded: of the arrays that a codec may compress, as `jax.ShapeDtypeStruct`s.
      exact: of the others.
      whole: whether `coded` are the user's arrays, and not a piece of a vector of them.
      drawing: axes whose devices draw random numbers of their own; `None` for those
        that are summed over.
    """

    coded: tuple[jax.ShapeDtypeStruct, ...]
    exact: tuple[jax.ShapeDtypeStruct, ...] = ()
    whole: bool = True
    drawing: AxisName | None = None

    @classmethod
    def of(cls, summands: Summands) -> "Layout":
        """Returns the layout of these arrays.

        >>> layout = Layout.of(Summands((jnp.zeros((2, 3)), jnp.zeros(4))))
        >>> layout.coded_size, layout.shapes
        (10, ((2, 3), (4,)))
        """
        return cls(*jax.tree.map(_form, summands))

    @classmethod
    def of_shapes(
        cls, shapes: Shapes, dtype: DTypeLike = jnp.float32, *, exact: int = 0
    ) -> "Layout":
        """Returns the layout of arrays of one dtype, and a vector that stays exact."""
        coded = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        return cls(coded, (jax.ShapeDtypeStruct((exact,), dtype),) if exact else ())

    @property
    def shapes(self) -> Shapes | None:
        """Shapes of the arrays for the codec; `None` for a piece of them."""
        return tuple(tuple(x.shape) for x in self.coded) if self.whole else None

    @property
    def coded_size(self) -> int:
        """Elements that may be compressed."""
        return sum(math.prod(x.shape) for x in self.coded)

    @property
    def exact_size(self) -> int:
        """Elements that may not."""
        return sum(math.prod(x.shape) for x in self.exact)

    @property
    def working_dtype(self) -> np.dtype:
        """In what vectors are summed: float32, or float64 if any array is float64."""
        dtypes = {working_dtype(x.dtype) for x in (*self.coded, *self.exact)}
        return max(dtypes, key=lambda dtype: dtype.itemsize, default=np.dtype("f4"))

    def vectors(self, summands: Summands) -> tuple[jax.Array, jax.Array]:
        """Returns the arrays as two vectors in the working dtype, coded and exact."""
        dtype = self.working_dtype
        return joined(summands.coded, dtype), joined(summands.exact, dtype)

    def arrays(self, coded: jax.Array, exact: jax.Array) -> Summands:
        """Undoes `vectors`, and gives each array its own dtype back."""
        return Summands(apart(coded, self.coded), apart(exact, self.exact))

    def widened(self) -> "Layout":
        """Returns the layout of the arrays a codec compresses, in the working dtype."""
        dtype = self.working_dtype
        coded = tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in self.coded)
        return self._replace(coded=coded, exact=())


def _form(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

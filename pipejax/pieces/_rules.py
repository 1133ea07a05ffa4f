"""How each operation of an optimizer's update runs on pieces of arrays.

An array may be split over mesh axes, so that every device has a piece of it. The rules
say how an operation on whole arrays is done on pieces:

- An elementwise operation is done on the pieces. Of operands that every device has
  whole, it uses the piece that belongs to the others.
- A sum over all elements, or whether all or any of them are true, is found on each
  piece, and then added over devices.

There is no rule for any other operation, such as a matmul, which needs elements of
several pieces.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pipejax.vectors import working_dtype

Split = tuple[tuple[str, ...], ...]
"""For each axis of an array, the mesh axes over which it is split."""

# The names of operations whose result at a place depends on the operands at this place:
# arithmetic, comparisons and bits, copies, and other functions.
_NAMES = """
abs add add_any cbrt ceil clamp div exp exp2 expm1 floor integer_pow log log1p max min
mul neg nextafter pow reduce_precision rem round rsqrt sign sqrt square sub
and bitcast_convert_type clz eq ge gt is_finite le lt ne not or population_count
select_n shift_left shift_right_arithmetic shift_right_logical xor
convert_element_type copy copy_p stop_gradient
acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erf_inv erfc lgamma logistic
sin sinh tan tanh
"""
_ELEMENTWISE = frozenset(_NAMES.split())


class NotElementwiseError(ValueError):
    """An update has an operation that needs elements of several pieces."""


class Rule(NamedTuple):
    """How an operation runs on pieces.

    Attributes:
      run: Function from the operands on this device to the results on this device.
      splits: How each result is split.
      finish: If it is not `None`, the result of `run` is a number that must be added
        over devices, and this function turns the sum into the result.
      dtype: The dtype of this number.
    """

    run: Callable[..., Sequence[Any]]
    splits: tuple[Split, ...]
    finish: Callable[[jax.Array], jax.Array] | None = None
    dtype: np.dtype | None = None


class Devices(NamedTuple):
    """The devices that have the pieces.

    Attributes:
      sizes: The sizes of the mesh axes along which they lie, by name.
    """

    sizes: Mapping[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the mesh axes along which the devices lie."""
        return tuple(self.sizes)

    def count(self, names: tuple[str, ...]) -> int:
        """Returns the number of devices along some of the axes."""
        return math.prod(self.sizes[name] for name in names)

    def shape(self, shape: Sequence[int], split: Split) -> tuple[int, ...]:
        """Returns the shape of a piece of an array."""
        pairs = zip(shape, split, strict=True)
        return tuple(size // self.count(names) for size, names in pairs)

    def piece(self, x: jax.Array, split: Split) -> jax.Array:
        """Returns this device's piece of an array that it has whole."""
        for axis, names in enumerate(split):
            if names:
                length = x.shape[axis] // self.count(names)
                start = lax.axis_index(names) * length
                x = lax.dynamic_slice_in_dim(x, start, length, axis)
        return x

    def once(self, x: jax.Array, split: Split) -> jax.Array:
        """Returns a number on one of the devices that have the same piece, 0 on others.

        Args:
          x: A number that belongs to this device's piece of an array.
          split: How the array is split.
        """
        used = {name for names in split for name in names}
        others = tuple(n for n in self.names if n not in used and self.sizes[n] > 1)
        return jnp.where(lax.axis_index(others) == 0, x, 0) if others else x


def whole(ndim: int) -> Split:
    """Returns the split of an array that every device has whole."""
    return ((),) * ndim


def is_split(split: Split) -> bool:
    """Returns whether an array is split along any of its axes."""
    return any(split)


def acts_elementwise(equation: Any) -> bool:
    """Returns whether an operation is elementwise, however its operands are split."""
    return equation.primitive.name in _ELEMENTWISE


def on_elements(equation: Any, *values: Any) -> Sequence[Any]:
    """Runs an elementwise operation on operands that all have one shape.

    Args:
      equation: The equation of a jaxpr, traced at other shapes.
      *values: Its operands.
    """
    out = equation.primitive.bind(*values, **equation.params)
    return out if equation.primitive.multiple_results else [out]


def is_elementwise(equation: Any, splits: Sequence[Split]) -> bool:
    """Returns whether an operation is done on pieces element by element.

    Its operands that are not split may then be given as numbers, if all elements of
    such an operand are the same.

    Args:
      equation: The equation of a jaxpr.
      splits: How its operands are split.
    """
    return acts_elementwise(equation) and any(map(is_split, splits))


def rule_of(equation: Any, splits: Sequence[Split], devices: Devices) -> Rule:
    """Returns how an operation runs on pieces.

    Args:
      equation: The equation of a jaxpr, traced at the shapes of the whole arrays.
      splits: How its operands are split. At least one of them is.
      devices: The devices.

    Raises:
      NotElementwiseError: If there is no rule.
    """
    name = equation.primitive.name
    if is_elementwise(equation, splits):
        return _elementwise(equation, splits, devices)
    if name == "optimization_barrier":
        return Rule(_barrier, tuple(splits))
    if name == "broadcast_in_dim":
        return _broadcast(equation, splits[0], devices)
    if name in ("reduce_sum", "reduce_and", "reduce_or"):
        return _reduction(equation, splits[0], devices)
    raise NotElementwiseError(name)


def _elementwise(equation: Any, splits: Sequence[Split], devices: Devices) -> Rule:
    """Returns the rule of an operation that works element by element."""
    found = {split for split in splits if is_split(split)}
    if len(found) > 1:
        raise NotElementwiseError(f"{equation.primitive.name} of arrays split apart")
    (split,) = found

    shape = devices.shape(equation.outvars[0].aval.shape, split)
    ndims = [var.aval.ndim for var in equation.invars]

    def fitted(x: Any, had: Split, ndim: int) -> Any:
        if is_split(had) or not ndim:
            return x
        # A number stands for an array whose elements are all the same.
        return devices.piece(x, split) if jnp.ndim(x) else jnp.broadcast_to(x, shape)

    def run(*values: Any) -> Sequence[Any]:
        own = [fitted(*each) for each in zip(values, splits, ndims, strict=True)]
        return on_elements(equation, *own)

    return Rule(run, (split,) * len(equation.outvars))


def _barrier(*values: Any) -> Sequence[Any]:
    """Returns the values, behind a barrier for the compiler."""
    return lax.optimization_barrier(list(values))


def _broadcast(equation: Any, split: Split, devices: Devices) -> Rule:
    """Returns the rule of a broadcast, which keeps the axes that are split."""
    params, (operand, *_) = equation.params, equation.invars
    out = list(whole(len(params["shape"])))
    for axis, to in enumerate(params["broadcast_dimensions"]):
        if split[axis] and operand.aval.shape[axis] != params["shape"][to]:
            raise NotElementwiseError("broadcast_in_dim along a split axis")
        out[to] = split[axis]
    shape = devices.shape(params["shape"], tuple(out))

    def run(x: Any) -> Sequence[Any]:
        return [lax.broadcast_in_dim(x, shape, params["broadcast_dimensions"])]

    return Rule(run, (tuple(out),))


def _reduction(equation: Any, split: Split, devices: Devices) -> Rule:
    """Returns the rule of a reduction, which is added over devices if it must be."""
    name, axes = equation.primitive.name, equation.params["axes"]
    left = tuple(names for axis, names in enumerate(split) if axis not in axes)
    reductions: dict[str, Any]
    reductions = {"reduce_sum": jnp.sum, "reduce_and": jnp.all, "reduce_or": jnp.any}
    reduce = reductions[name]
    (result,) = equation.outvars
    dtype = result.aval.dtype
    if not any(split[axis] for axis in axes):
        return Rule(lambda x: [reduce(x, axis=axes).astype(dtype)], (left,))
    if left:
        raise NotElementwiseError(f"{name} along some axes of a split array")
    if name == "reduce_sum" and not jnp.issubdtype(dtype, jnp.floating):
        raise NotElementwiseError(f"{name} of {dtype.name}")
    wide = working_dtype(dtype)

    def run(x: Any) -> Sequence[Any]:
        if name == "reduce_sum":
            own = jnp.sum(x.astype(wide))
        else:  # how many pieces have an element that is false, or true
            own = (~jnp.all(x) if name == "reduce_and" else jnp.any(x)).astype(wide)
        return [devices.once(own, split)]

    finish = {
        "reduce_sum": lambda total: total.astype(dtype),
        "reduce_and": lambda total: total == 0,
        "reduce_or": lambda total: total > 0,
    }[name]
    return Rule(run, (left,), finish, wide)

"""How each operation of an optimizer's update runs on pieces of arrays.

An array may be split over mesh axes, so that every device has a piece of it. The rules
say how an operation on whole arrays is done on pieces:

- An elementwise operation is done on the pieces. Of operands that every device has
  whole, it uses the piece that belongs to the others. An operand of length 1 along an
  axis belongs to every piece.
- An operation that moves no element to another piece, such as a broadcast or a sum
  along an axis that is not split, is done on the pieces, too.
- A sum, a maximum or a minimum over a split axis, or whether all or any elements are
  true, is found on each piece, and then found from the results of all devices.

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

from pipejax._internal.ravel import working_dtype
from pipejax._internal.types import JaxprEqn

Split = tuple[tuple[str, ...], ...]
"""For each axis of an array, the mesh axes over which it is split."""

# The names of operations whose result at a place depends on the operands at this place:
# arithmetic, comparisons and bits, copies and conversions, and other functions.
_NAMES = """
abs add add_any cbrt ceil clamp div exp exp2 expm1 floor integer_pow log log1p log2 max
min mul neg nextafter one_minus_square pow reduce_precision rem round rsqrt sign
sqrt square sub
and bitcast_convert_type clz eq ge gt is_finite le lt ne not or
population_count select_n shift_left shift_right_arithmetic shift_right_logical xor
complex conj convert_element_type copy imag real stop_gradient
acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cos cosh digamma erf
erf_inv erfc igamma igamma_grad_a igammac lgamma logistic polygamma
regularized_incomplete_beta sin sinh tan tanh zeta
"""
_ELEMENTWISE = frozenset(_NAMES.split())

# Reductions, which are done on pieces along axes that are not split.
_REDUCTIONS = frozenset(
    f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")
)


class NotElementwiseError(ValueError):
    """An update has an operation that needs elements of several pieces."""


class Rule(NamedTuple):
    """How an operation runs on pieces.

    Attributes:
      run: Function from the operands on this device to the results on this device.
      sent: If it is not `None`, the result of `run` is this device's part of a sum over
        devices, of this shape and dtype.
      finish: Function from the sum to the result of the operation.
    """

    run: Callable[..., Sequence[Any]]
    splits: tuple[Split, ...]
    sent: jax.ShapeDtypeStruct | None = None
    finish: Callable[[jax.Array], jax.Array] = lambda total: total


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

    def divides(self, split: Split) -> Split:
        """Returns a split without mesh axes of one device, which divide nothing."""
        return tuple(tuple(n for n in names if self.sizes[n] > 1) for names in split)

    def once(self, x: jax.Array, split: Split) -> jax.Array:
        """Returns an array on one of all devices with the same piece, 0 on others."""
        used = {name for names in split for name in names}
        others = tuple(n for n in self.names if n not in used and self.sizes[n] > 1)
        return jnp.where(lax.axis_index(others) == 0, x, 0) if others else x


def whole(ndim: int) -> Split:
    """Returns the split of an array that every device has whole."""
    return ((),) * ndim


def is_split(split: Split) -> bool:
    """Returns whether an array is split along any of its axes."""
    return any(split)


def acts_elementwise(equation: JaxprEqn) -> bool:
    """Returns whether an operation is elementwise, however its operands are split."""
    return equation.primitive.name in _ELEMENTWISE


def on_elements(equation: JaxprEqn, *values: Any) -> Sequence[Any]:
    """Runs an elementwise operation on operands that all have one shape."""
    out = equation.primitive.bind(*values, **equation.params)
    return out if equation.primitive.multiple_results else [out]


def is_elementwise(equation: JaxprEqn, splits: Sequence[Split]) -> bool:
    """Returns whether an operation is done on pieces element by element.

    Its operands that are not split may then be given as numbers, if all elements of
    such an operand are the same.
    """
    return acts_elementwise(equation) and any(map(is_split, splits))


def rule_of(equation: JaxprEqn, splits: Sequence[Split], devices: Devices) -> Rule:
    """Returns how an operation runs on pieces."""
    name = equation.primitive.name
    if name == "bitcast_convert_type":
        return _bitcast(equation, splits[0])
    if is_elementwise(equation, splits):
        return _elementwise(equation, splits, devices)
    if name == "optimization_barrier":
        return Rule(_barrier, tuple(splits))
    if name == "broadcast_in_dim":
        return _broadcast(equation, splits[0], devices)
    if name in ("reshape", "squeeze"):
        return _reshape(equation, splits[0], devices)
    if name in _REDUCTIONS:
        return _reduction(equation, splits[0], devices)
    raise NotElementwiseError(name)


def _elementwise(equation: JaxprEqn, splits: Sequence[Split], devices: Devices) -> Rule:
    whole_shape = equation.outvars[0].aval.shape
    split = _joint(equation.primitive.name, splits, len(whole_shape))
    shape = devices.shape(whole_shape, split)
    forms = [var.aval.shape for var in equation.invars]

    def fitted(x: Any, had: Split, form: tuple[int, ...]) -> Any:
        if not form:
            return x
        if not jnp.ndim(x):  # a number stands for an array of equal elements
            return jnp.broadcast_to(x, shape)
        triples = zip(split, had, form, strict=True)
        more = tuple(() if own or n == 1 else names for names, own, n in triples)
        return devices.piece(x, more)

    def run(*values: Any) -> Sequence[Any]:
        own = [fitted(*each) for each in zip(values, splits, forms, strict=True)]
        return on_elements(equation, *own)

    return Rule(run, (split,) * len(equation.outvars))


def _joint(name: str, splits: Sequence[Split], ndim: int) -> Split:
    """Returns the split of an elementwise result, which has those of all operands."""
    joint: list[tuple[str, ...]] = []
    for axis in range(ndim):
        kinds = {split[axis] for split in splits if split} - {()} or {()}
        joint += kinds if len(kinds) == 1 else ()
    used = [name for names in joint for name in names]
    if len(joint) < ndim or len({*used}) < len(used):
        raise NotElementwiseError(f"{name} of arrays split apart")
    return tuple(joint)


def _barrier(*values: Any) -> Sequence[Any]:
    return lax.optimization_barrier(list(values))


def _broadcast(equation: JaxprEqn, split: Split, devices: Devices) -> Rule:
    """Returns the rule of a broadcast, which keeps the axes that are split."""
    params = equation.params
    out = list(whole(len(params["shape"])))
    for names, to in zip(split, params["broadcast_dimensions"], strict=True):
        out[to] = names
    shape = devices.shape(params["shape"], tuple(out))

    def run(x: Any) -> Sequence[Any]:
        return [lax.broadcast_in_dim(x, shape, params["broadcast_dimensions"])]

    return Rule(run, (tuple(out),))


def _reshape(equation: JaxprEqn, split: Split, devices: Devices) -> Rule:
    """Returns the rule of a reshape that only adds or removes axes of length 1."""
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    kept = [names for n, names in zip(old, split, strict=True) if n != 1]
    if [n for n in old if n != 1] != [n for n in new if n != 1]:
        raise NotElementwiseError(equation.primitive.name)
    left = iter(kept)
    out = tuple(() if n == 1 else next(left) for n in new)
    shape = devices.shape(new, out)
    return Rule(lambda x: [x.reshape(shape)], (out,))


def _bitcast(equation: JaxprEqn, split: Split) -> Rule:
    added = equation.outvars[0].aval.ndim - len(split)
    if added < 0 and split[-1]:
        raise NotElementwiseError("bitcast_convert_type of a split axis")
    out = (*split, ()) if added > 0 else split[: len(split) + added]
    return Rule(lambda x: on_elements(equation, x), (out,))


def _reduction(equation: JaxprEqn, split: Split, devices: Devices) -> Rule:
    name, axes = equation.primitive.name, equation.params["axes"]
    left = tuple(names for axis, names in enumerate(split) if axis not in axes)
    if not any(split[axis] for axis in axes):
        return Rule(lambda x: on_elements(equation, x), (left,))
    if any(left):
        raise NotElementwiseError(f"{name} of an array that is split along more axes")
    form = equation.outvars[0].aval
    if name == "reduce_sum":
        return _summed(equation, split, devices, _wide(form.dtype))
    if name in ("reduce_and", "reduce_or") and form.dtype == jnp.bool_:
        return _counted(equation, split, devices)
    if name in ("reduce_max", "reduce_min"):
        return _side_by_side(equation, split, devices)
    raise NotElementwiseError(f"{name} of {form.dtype.name}")


def _summed(equation: JaxprEqn, split: Split, devices: Devices, wide: Any) -> Rule:
    """Returns the rule of a sum, to which each device adds that of its piece."""
    (result,), axes = equation.outvars, equation.params["axes"]
    form = result.aval

    def run(x: Any) -> Sequence[Any]:
        return [devices.once(jnp.sum(x.astype(wide), axes, dtype=wide), split)]

    sent = jax.ShapeDtypeStruct(form.shape, wide)
    return Rule(run, (whole(form.ndim),), sent, lambda x: x.astype(form.dtype))


def _counted(equation: JaxprEqn, split: Split, devices: Devices) -> Rule:
    """Returns the rule of whether all or any elements are true.

    Devices count the pieces that have an element that is false, or true.
    """
    form, every = equation.outvars[0].aval, equation.primitive.name == "reduce_and"

    def run(x: Any) -> Sequence[Any]:
        (found,) = on_elements(equation, x)
        own = (~found if every else found).astype(jnp.float32)
        return [devices.once(own, split)]

    sent = jax.ShapeDtypeStruct(form.shape, np.dtype("float32"))
    finish = (lambda n: n == 0) if every else (lambda n: n > 0)
    return Rule(run, (whole(form.ndim),), sent, finish)


def _side_by_side(equation: JaxprEqn, split: Split, devices: Devices) -> Rule:
    """Returns the rule of a maximum or minimum, to which devices send one of their own.

    Each device adds its own to zeros in the places of the others, so that all of them
    arrive in the sum. Unlike an all-reduce by maximum, this keeps every NaN.
    """
    form, wide = equation.outvars[0].aval, _wide(equation.outvars[0].aval.dtype)
    sent = jax.ShapeDtypeStruct((devices.count(devices.names), *form.shape), wide)

    def run(x: Any) -> Sequence[Any]:
        (own,) = on_elements(equation, x)
        zeros = jnp.zeros(sent.shape, sent.dtype)
        return [zeros.at[lax.axis_index(devices.names)].set(own.astype(wide))]

    def finish(all_devices: jax.Array) -> jax.Array:
        every = all_devices.astype(form.dtype)
        return every.max(0) if equation.primitive.name == "reduce_max" else every.min(0)

    return Rule(run, (whole(form.ndim),), sent, finish)


def _wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return working_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise NotElementwiseError(f"a reduction of {dtype.name}")
    narrow = dtype == jnp.bool_ or dtype.itemsize < 4
    return np.dtype("int32") if narrow else np.dtype(dtype)

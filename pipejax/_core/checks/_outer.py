"""Checks that an outer optimizer works on chunks as it would on parameters.

A chunk is a vector for each dtype, named by the dtype. It has a part of the elements of
every parameter, but neither their names nor their shapes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipejax._core.prediction import has_sums, kind_of
from pipejax._internal.mesh import without_mesh
from pipejax._internal.types import Tree

from ._settings import check_tx

# Shapes and names by which masks tell parameters apart. Adafactor factors arrays with
# two axes of at least 128 elements.
_SHAPES = {"kernel": (128, 128), "weight": (2, 3), "bias": (5,), "scale": ()}
# Less than what a weight decay in use adds to an update. The numbers are float64,
# because an update may be a small difference of parameters, with their rounding.
_CLOSE = 1e-6
_CHOOSE = "Choose optax.sgd, with or without momentum, or optax.adam."


def check_outer(outer_tx: Any) -> Any:
    """Returns `outer_tx`; raises a `ValueError` unless it suits chunks."""
    check_tx(outer_tx, "outer_tx")
    try:
        rule = _broken_rule(outer_tx)
    except Exception as error:  # whatever an optimizer raises
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            "`outer_tx` must update arrays of any names from gradients, its state and"
            " parameters alone, since it is given a chunk of the parameters at a time,"
            f" as vectors named by their dtypes; got one that raises {said}. {_CHOOSE}"
        ) from error
    if rule:
        raise ValueError(f"`outer_tx` must {rule}. {_CHOOSE}")
    return outer_tx


@without_mesh()
def _broken_rule(outer_tx: optax.GradientTransformation) -> str:
    """Returns the rule that an optimizer breaks, and how, or an empty text."""
    if _mixes(outer_tx):
        return (
            "work element by element, since it is given a chunk of the parameters at a"
            " time; got one that mixes elements, or sums over them, as clipping by a"
            " norm does"
        )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        alike = jax.device_get(jax.jit(lambda: _treats_alike(outer_tx))())
    if not alike:
        return (
            "treat all parameters alike, since it is given a chunk of them at a time,"
            " as vectors without their names and shapes; got one that depends on these,"
            " as with a mask by `ndim`"
        )
    return ""


def _mixes(outer_tx: optax.GradientTransformation) -> bool:
    """Returns whether an update mixes elements, or sums over them."""
    # The matrix finds optimizers that would treat vectors in another way than the
    # matrices which a chunk is from.
    chunk = {"float32": jax.ShapeDtypeStruct((2, 8), jnp.float32)}

    def update(gradients: Any, state: Any, params: Any, loss: Any) -> Any:
        del loss
        return outer_tx.update(gradients, state, params)

    state = jax.eval_shape(outer_tx.init, chunk)
    mixes = kind_of(update, chunk, state, 1).name == "mixing"
    return mixes or has_sums(update, chunk, state, chunk, None)


def _treats_alike(outer_tx: optax.GradientTransformation) -> jax.Array:
    """Returns whether arrays of several shapes move as they do joined to a vector."""
    params = {name: _numbers(shape) for name, shape in _SHAPES.items()}
    alone = _joined(_moved(outer_tx, params))["float32"]
    as_vector = _moved(outer_tx, _joined(params))["float32"]
    return jnp.abs(alone - as_vector).max() <= _CLOSE * jnp.abs(as_vector).max()


def _moved(outer_tx: optax.GradientTransformation, params: Tree) -> Any:
    """Returns the sum of two updates, since a schedule may begin with a rate of 0."""
    # The gradients are small beside a decay of the weights.
    gradients = jax.tree.map(lambda w: 1e-3 * (1 + w), params)
    first, state = outer_tx.update(gradients, outer_tx.init(params), params)
    second, _ = outer_tx.update(gradients, state, optax.apply_updates(params, first))
    return jax.tree.map(jnp.add, first, second)


def _numbers(shape: tuple[int, ...]) -> jax.Array:
    """Returns different numbers from 1 to 2."""
    size = math.prod(shape)
    return 1 + jnp.arange(size, dtype=jnp.float64).reshape(shape) / size


def _joined(tree: Tree) -> dict[str, jax.Array]:
    return {"float32": jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])}

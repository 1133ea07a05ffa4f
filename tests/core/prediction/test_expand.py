"""Tests the expansion of a function to first order, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pipejax._core.prediction._expand import expanded, works_elementwise

M = {"w": jnp.float32([[0.5, -2.0], [3.0, 0.25]]), "b": jnp.float32([1.0, -1.0])}
ONES = jax.tree.map(jnp.ones_like, M)


def squares(g):
    return jax.tree.map(lambda x: x * x, g)


def clipped(g):
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g)))
    return jax.tree.map(lambda x: 3 * x * x / norm, g)


def branched(g):
    """Returns a cube in a branch, whose factor is a norm."""
    norm = optax.tree.norm(g)
    return jax.tree.map(
        lambda x: lax.cond(norm > 0, lambda y: norm * y**3, lambda y: y, x), g
    )


LENGTH = float(np.sqrt(0.25 + 4 + 9 + 0.0625 + 2))


@pytest.mark.parametrize(
    ("function", "slope"),
    [
        (squares, lambda x: 2 * x),
        (clipped, lambda x: 6 * x / LENGTH),  # the norm is held
        (branched, lambda x: LENGTH * 3 * x**2),
        (jax.jit(squares), lambda x: 2 * x),
        (lambda g: jax.tree.map(jnp.sign, g), lambda x: 0 * x),
    ],
)
def test_value_and_slope_equal_results_by_hand(function, slope):
    value, (found,) = jax.jit(lambda m: expanded(function, [m]))(M)
    wanted = jax.jit(function)(M)
    for name, x in M.items():
        np.testing.assert_array_equal(value[name], wanted[name])
        np.testing.assert_allclose(found[name], slope(np.asarray(x)), rtol=1e-6)


def test_each_argument_has_its_slope():
    def two_updates(first, second):
        return jax.tree.map(lambda a, b: a * a * b, first, second)

    twice = jax.tree.map(lambda x: 2 * x, M)
    _, (first, second) = expanded(two_updates, [M, twice])
    for name, x in M.items():
        np.testing.assert_allclose(first[name], 2 * x * 2 * x, rtol=1e-6)
        np.testing.assert_allclose(second[name], x * x, rtol=1e-6)


def transposed(g):
    """Returns a sum with the transpose: two elements in each result."""
    return {"w": g["w"] + g["w"].T, "b": g["b"]}


def with_another(g):
    return {"w": g["w"], "b": g["b"] + g["w"].reshape(-1)[:2]}


def of_the_other(g):
    return {"w": g["w"] * 2, "b": g["w"][0]}


MIXING = {
    "a product of matrices": lambda g: g | {"w": g["w"] @ g["w"]},
    "a transpose": transposed,
    "elements of another array": with_another,
    "an array in place of another": of_the_other,
    "a running sum": lambda g: jax.tree.map(jnp.cumsum, g) | {"w": g["w"]},
    "a reversal": lambda g: jax.tree.map(lambda x: x[::-1], g),
    "a loop": lambda g: jax.tree.map(
        lambda x: lax.fori_loop(0, 3, lambda _, y: y * x, x), g
    ),
}
ELEMENTWISE = {
    "squares": squares,
    "a clip": clipped,
    "a branch": branched,
    "a reshape": lambda g: jax.tree.map(lambda x: (2 * x.ravel()).reshape(x.shape), g),
    "a dot of an array with itself": lambda g: jax.tree.map(
        lambda x: x * jnp.vdot(x, x), g
    ),
    "the largest of all elements": lambda g: jax.tree.map(lambda x: x / x.max(), g),
    "a norm of all arrays in one": lambda g: jax.tree.map(
        lambda x: x / jnp.linalg.norm(jnp.concatenate([g["w"].ravel(), g["b"]])), g
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_mixing_elements_are_found(name):
    assert not works_elementwise(lambda gs: MIXING[name](gs[0]), [M])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_sums_over_arrays_do_not_count_as_mixing(name):
    assert works_elementwise(lambda gs: ELEMENTWISE[name](gs[0]), [M])

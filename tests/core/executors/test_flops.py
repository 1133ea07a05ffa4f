"""Tests the FLOPs of traced equations against their shapes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pipejax._core.executors._flops import flops_of


def test_flops_of_matmul_and_convolution_equal_the_formula():
    """Counts 2 x 4 x 12 x 12 FLOPs in a matmul, and those of a 3 x 3 convolution."""
    (equation,) = jax.make_jaxpr(jnp.matmul)(*map(jnp.ones, [(4, 12), (12, 12)])).eqns
    assert flops_of(equation) == 2 * 4 * 12 * 12

    def convolve(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "VALID", (1, 1), (1, 1), numbers
        )

    shapes = map(jnp.ones, [(1, 5, 5, 2), (3, 3, 2, 7)])
    (equation,) = jax.make_jaxpr(convolve)(*shapes).eqns
    assert flops_of(equation) == 2 * (3 * 3 * 7) * (3 * 3 * 2)


def flops(function, *shapes):
    """Returns the FLOPs of all equations of a function, for arrays of these shapes."""
    arrays = map(jnp.ones, shapes)
    return sum(map(flops_of, jax.make_jaxpr(function)(*arrays).eqns))


def test_flops_of_a_batch_of_matmuls_equal_the_formula():
    """Counts 3 products of a 4 x 5 by a 5 x 6 matrix."""
    assert flops(jnp.matmul, (3, 4, 5), (3, 5, 6)) == 3 * (2 * 4 * 5 * 6)


def test_flops_of_a_depthwise_convolution_equal_the_formula():
    """Counts nine taps for each of 4 x 4 x 8 outputs, with one input channel each."""

    def convolve(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, k, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=4
        )

    assert flops(convolve, (1, 6, 6, 4), (3, 3, 1, 8)) == 2 * (4 * 4 * 8) * 9


def test_convolution_without_output_features_has_no_flops():
    def convolve(x, k):
        return lax.conv(x, k, (1, 1), "VALID")

    assert flops(convolve, (1, 4, 6, 6), (0, 4, 3, 3)) == 0


ONE = 2 * 4 * 4 * 4


def once(x):
    return jnp.tanh(x @ x)


def times(count):
    return lambda x: lax.fori_loop(0, count, lambda _, x: once(x), x)


@pytest.mark.parametrize(
    ("function", "matmuls"),
    [
        (jnp.tanh, 0),
        (jax.jit(jax.jit(once)), 1),
        (jax.checkpoint(once), 1),
        (times(5), 5),
        (lambda x: lax.fori_loop(0, 3, lambda _, x: times(2)(x), x), 6),
        (lambda x: lax.cond(x[0, 0] > 0, times(3), once, x), 3),
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: x, lambda x: -x, x), 0),
        (lambda x: lax.while_loop(lambda x: x[0, 0] < 9, once, x), 1),
    ],
    ids=[
        *("none", "jit", "remat", "loop", "loop in a loop", "cond", "idle cond"),
        "while",
    ],
)
def test_flops_inside_functions_and_loops_are_counted(function, matmuls):
    """A loop counts by its length if known, and a condition by its longer branch."""
    assert flops(function, (4, 4)) == matmuls * ONE


def test_flops_of_grouped_matmuls_count_each_row_once():
    def loss(x, w):
        return lax.ragged_dot(x, w, jnp.array([3, 3, 2])).sum()

    shapes, once = [(8, 4), (3, 4, 5)], 2 * 8 * 4 * 5
    assert flops(loss, *shapes) == once
    assert flops(jax.grad(loss, argnums=(0, 1)), *shapes) == 3 * once


def test_flops_of_a_kernel_count_its_whole_grid():
    from jax.experimental import pallas as pl  # takes long to import

    def kernel(x_ref, out_ref):
        out_ref[:] = x_ref[:] @ x_ref[:]

    block = pl.BlockSpec((8, 8), lambda i: (i, 0))
    form = jax.ShapeDtypeStruct((32, 8), jnp.float32)
    program = pl.pallas_call(
        kernel, form, grid=(4,), in_specs=[block], out_specs=block, interpret=True
    )
    assert flops(program, (32, 8)) == 4 * 2 * 8**3

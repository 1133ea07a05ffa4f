"""Tests operations on pieces against whole arrays, on 1, 2 and 8 devices.

All operations of a kind are results of one function, which is compiled once for each
number of devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from jax.scipy import special

from pipejax._core.partitioned import Devices, NotElementwiseError, on_partitions, whole
from pipejax._core.partitioned._rules import _ELEMENTWISE
from pipejax._internal.jaxpr import inlined

from .updates import assert_close, on_devices

ROWS = (("data",), ())
X = np.linspace(0.05, 0.95, 24, dtype=np.float32).reshape(8, 3)
Y = np.float32(np.linspace(2, 1, 24)).reshape(8, 3)
N = np.arange(24, dtype=np.int32).reshape(8, 3) + 3
OF_ONE = (
    *(lax.abs, lax.cbrt, lax.ceil, lax.exp, lax.exp2, lax.expm1, lax.floor, lax.log),
    *(lax.log1p, lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sqrt, lax.square),
    *(lax.is_finite, lax.acos, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.cos),
    *(lax.cosh, lax.sin, lax.sinh, lax.tan, lax.tanh, lax.logistic, lax.stop_gradient),
    *(lax.digamma, lax.erf, lax.erf_inv, lax.erfc, lax.lgamma, lax.bessel_i0e),
    *(lax.bessel_i1e, jnp.copy, jnp.log2),
    lambda x: lax.acosh(1 + x),
    lambda x: lax.integer_pow(x, -3),
    lambda x: lax.reduce_precision(x, 5, 4),
    lambda x: lax.clamp(0.2, x, 0.7),
    lambda x: lax.clamp(x - 0.1, 0.5 * x, x),
    lambda x: lax.complex(x, 2 * x) * lax.conj(lax.complex(x, x)),
    lambda x: (lax.real(lax.complex(x, x)), lax.imag(lax.complex(x, -x))),
    lambda x: lax.bitcast_convert_type(x, jnp.int32),
    lambda x: [
        x.astype(t).astype(jnp.float32)
        for t in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16)
    ],
    lambda x: (7 * x).astype(jnp.int4).astype(jnp.float32),
)
OF_TWO = (
    *(lax.add, lax.atan2, lax.div, lax.max, lax.min, lax.mul, lax.nextafter, lax.pow),
    *(lax.rem, lax.sub, lax.eq, lax.ge, lax.gt, lax.le, lax.lt, lax.ne, lax.igamma),
    *(lax.igammac, lax.igamma_grad_a, lax.zeta),
    lambda x, y: lax.polygamma(lax.round(y), x),
    lambda x, y: lax.betainc(x, y, lax.min(x, y)),
    lambda x, y: special.betainc(y, y, x),
    lambda x, y: lax.select_n(x < 0.5, x, y),
    lambda x, y: jax.jvp(lambda z: z * jnp.tanh(z), (x,), (y,)),
    lambda x, y: (jnp.float32(3) * x, x / 3, 1 - y),
)
OF_INTEGERS = (
    *(lax.clz, lax.population_count, lax.bitwise_not),
    lambda n: (lax.bitwise_and(n, 2 * n), lax.bitwise_or(n, 2 * n)),
    lambda n: lax.bitwise_xor(n, n + 1),
    lambda n: lax.shift_left(n, lax.rem(n, 4)),
    lambda n: lax.shift_right_arithmetic(-n, lax.rem(n, 4)),
    lambda n: lax.shift_right_logical(-n, lax.rem(n, 4)),
)


def elementwise(x, y, n):
    return (
        [f(x) for f in OF_ONE],
        [f(x, y) for f in OF_TWO],
        [f(n) for f in OF_INTEGERS],
    )


def compared(function, *args, splits=None, rounding=2e-6):
    """Compares a function on pieces with the function of whole arrays."""
    splits = splits or [ROWS] * len(args)
    wanted = jax.jit(function)(*args)
    for count in (1, 2, 8):
        program = on_partitions(function, args, splits, Devices({"data": count}))
        assert_close(on_devices(program, args, splits, count), wanted, rounding)


def test_elementwise_operations_equal_whole_arrays():
    """Special functions are series of up to 100 terms, which compilers add differently.

    Neighbouring elements differ by 0.01 or more.
    """
    compared(elementwise, X, Y, N, rounding=100 * 2**-23)


def test_every_elementwise_operation_of_the_installed_jax_is_tested():
    closed = jax.make_jaxpr(elementwise)(X, Y, N)
    names = dict(zip(closed.jaxpr.invars, "xyn", strict=True))
    found = {each.equation.primitive.name for each in inlined(closed, names)}
    known = {getattr(p, "name", None) for p in vars(primitives).values()}
    later = {"log2", "one_minus_square"}  # of JAX 0.12
    assert _ELEMENTWISE - found <= later - known


@jax.custom_jvp
def halved(x):
    return x / 2


@halved.defjvp
def _(primals, tangents):
    return halved(*primals), 3 * tangents[0]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (5 * g,))


def called(x, y, number):
    """Calls functions and branches; what is not split may loop as it likes."""
    turns = lax.while_loop(lambda n: n < 20, lambda n: 2 * n, number)
    power, powers = lax.scan(lambda c, _: (1.5 * c, c), number, None, 3)
    return (
        jax.jit(lambda z: jnp.where(jnp.isfinite(z), z, 0.0))(x / (x - x)),
        halved(x) + jax.jvp(halved, (x,), (y,))[1],
        doubled(x) + jax.vjp(doubled, x)[1](y)[0],
        jax.nn.relu(x - 0.5) + jax.jvp(jax.nn.silu, (x,), (y,))[1],
        lax.cond(number > 0, lambda z: z * y, lambda z: -z, x),
        lax.switch(1, [jnp.sin, jnp.cos, jnp.tan], x),
        lax.optimization_barrier((x, number))[0] * turns,
        lax.select_n(number > 0, x, y) * power * powers.sum(),
    )


def test_calls_branches_and_loops_equal_whole_arrays():
    compared(called, X, Y, jnp.float32(3), splits=[ROWS, ROWS, ()])


def reduced(x, n, flags):
    """Reduces over all axes, over the split axis, and over the other one."""
    with_nan = jnp.where(x > 0.9, jnp.nan, x)
    both = [
        f(z, axis)
        for f in (jnp.sum, jnp.max, jnp.min)
        for z in (x, -n, x.astype(jnp.bfloat16), n.astype(jnp.int8))
        for axis in (None, 0, 1)
    ]
    logical = [f(flags, a) for f in (jnp.all, jnp.any) for a in (None, 0, 1)]
    return both, logical, jnp.max(with_nan), jnp.prod(x, 1), jnp.max(flags, 0)


def test_reductions_equal_whole_arrays():
    compared(reduced, X, N, np.arange(24).reshape(8, 3) % 5 > 1)


def test_gradient_of_a_maximum_is_shared_by_equal_elements():
    """JAX shares the derivative of a maximum among the elements that attain it."""
    x = np.float32(np.minimum(X, 0.5))
    compared(lambda x, y: jax.jvp(jnp.max, (x,), (y,)), x, Y)


def test_sum_of_integers_wraps_around():
    big = np.full((8, 3), 2**30, np.int32)
    compared(jnp.sum, big)


ROW, COLUMN = X[:1], X[:, :1]
SHAPES = {
    "a row for all": (lambda x, row: x * row, ROW, whole(2)),
    "a column for all": (lambda x, column: x * column, COLUMN, whole(2)),
    "a split column": (lambda x, column: x * column, COLUMN, ROWS),
    "one element": (lambda x, one: x * one, X[:1, :1], whole(2)),
    "another axis": (lambda x, row: (x[..., None] * row[:, None]).mean(-1), ROW, None),
    "squeezed": (lambda x, row: jnp.squeeze(x[:, None], 1) + row, ROW, whole(2)),
    "reshaped": (lambda x, row: x.reshape(1, 8, 1, 3) * row[None, None], ROW, whole(2)),
    "bytes": (lambda x, row: lax.bitcast_convert_type(x, jnp.uint8), ROW, whole(2)),
    "bytes and back": (
        lambda x, row: lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.uint8) ^ jnp.uint8(1), jnp.float32
        ),
        ROW,
        whole(2),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_changes_of_shape_equal_whole_arrays(name):
    function, other, split = SHAPES[name]
    compared(function, X, other, splits=[ROWS, split or whole(2)])


REFUSED = {
    "reshape": lambda x: x.reshape(24),
    "transpose": lambda x: x.T,
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "reduce_prod of float32": jnp.prod,
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "dot_general": lambda x: x @ np.ones((3, 3), np.float32),
    "a reduction of complex64": lambda x: jnp.sum(lax.complex(x, x)),
    "while": lambda x: lax.while_loop(lambda z: z[0, 0] < 9, lambda z: 2 * z, x),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_unsupported_operation_is_refused_by_its_name(operation):
    on_partitions(REFUSED[operation], [X], [ROWS], Devices({"data": 1}))
    with pytest.raises(NotElementwiseError, match=f"^{operation}$"):
        on_partitions(REFUSED[operation], [X], [ROWS], Devices({"data": 2}))


def test_multiplication_accepts_arrays_split_along_different_axes():
    devices = Devices({"host": 2, "fsdp": 3})
    splits = [(("host",), ()), ((), ("fsdp",))]
    program = on_partitions(lax.mul, [X, Y], splits, devices)
    assert program.splits == ((("host",), ("fsdp",)),)
    for other in ((("fsdp",), ()), ((), ("host",))):
        with pytest.raises(NotElementwiseError, match=r"^mul of arrays split apart$"):
            on_partitions(lax.mul, [X, Y], [splits[0], other], devices)
    with pytest.raises(NotElementwiseError, match=r"^reduce_sum of an array that is"):
        on_partitions(lambda x, y: (x * y).sum(0), [X, Y], splits, devices)

"""Tests traced programs as flat lists of equations, by running them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax._internal.jaxpr import (
    Constant,
    forwarded,
    inlined,
    name_of,
    runner,
    value_of,
)

OFFSET = np.arange(3, dtype=np.float32)


def function(x):
    inner = jax.jit(lambda x: jax.jit(jnp.sin)(x) + OFFSET)
    branch = jax.lax.cond(x.sum() > 0, lambda: x, lambda: -x)
    return jax.nn.relu(inner(x)), branch, jnp.float32(3)


def test_inlined_equations_run_like_the_function():
    x = jnp.float32([-3, 1, 1])
    closed = jax.make_jaxpr(function)(x)
    (variable,) = closed.jaxpr.invars
    names = {variable: "x"}
    env, seen = {"x": x}, []
    for each in inlined(closed, names):
        seen.append(each.equation.primitive.name)
        results = runner(each)(*(value_of(env, name) for name in each.reads))
        env.update(zip(each.writes, results, strict=True))
    found = [value_of(env, name_of(names, v)) for v in closed.jaxpr.outvars]
    for a, b in zip(found, function(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert not {"jit", "pjit", "custom_jvp_call"} & set(seen)
    assert "cond" in seen


def over(body):
    """Returns a scan over the elements of x and y, whose carries are x and y."""

    def scanned(x, y):
        (a, b), (c, d) = jax.lax.scan(lambda u, v: body(*u, *v), (x, y), (x, y))
        return a, b, c, d

    return scanned


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, y: (y, x, x + y), [1, 0, None]),
        (jax.jit(lambda x, y: (y, jax.jit(lambda z: z)(x))), [1, 0]),
        (jax.checkpoint(lambda x, y: (x, y * x)), [0, None]),
        (lambda x, y: (jax.lax.optimization_barrier(y), 1.0), [1, None]),
        # The carries x and y and the slices of x and y.
        (over(lambda a, b, c, d: ((a, b), (c, d))), [0, 1, 0, 1]),
        (over(lambda a, b, c, d: ((b, a), (d, c))), [None, None, 1, 0]),
        (over(lambda a, b, c, d: ((a + c, b), (a, d))), [None, 1, None, 1]),
        (lambda x, y: jax.lax.cond(x[0] > 0, lambda: x, lambda: y + 1), [None]),
    ],
)
def test_arguments_handed_on_are_found(function, found):
    closed = jax.make_jaxpr(function)(jnp.ones(3), jnp.ones(3))
    assert forwarded(closed) == found


def test_literals_are_read_as_constants():
    closed = jax.make_jaxpr(lambda x: x * 2)(1.0)
    ((_, _, reads, _),) = inlined(closed, {closed.jaxpr.invars[0]: "x"})
    assert reads[0] == "x"
    assert isinstance(reads[1], Constant)
    assert value_of({}, reads[1]) == 2

"""Tests traced programs as flat lists of equations, by running them."""

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._internal.jaxpr import Constant, inlined, name_of, runner, value_of

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


def test_literals_are_read_as_constants():
    closed = jax.make_jaxpr(lambda x: x * 2)(1.0)
    ((_, _, reads, _),) = inlined(closed, {closed.jaxpr.invars[0]: "x"})
    assert reads[0] == "x"
    assert isinstance(reads[1], Constant)
    assert value_of({}, reads[1]) == 2

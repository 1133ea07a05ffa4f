"""Tests over which axes a traced function communicates."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.traced_axes import collective_axes, constrained_axes

from ..core.executors.test_own_collectives import AXES, X, on_hosts, summed


def looped(x):
    return lax.scan(lambda x, _: (summed("host")(x), None), x, None, length=2)[0]


def branching(x):
    return lax.cond(x[0] > 0, lambda x: x, summed("device"), x)


def until_it_is_large(x):
    return lax.while_loop(lambda x: summed("host")(x).sum() < 9, lambda x: 2 * x, x)


def in_rows(x):
    return jax.vmap(summed("rows"), axis_name="rows")(x[None])[0]


@pytest.mark.parametrize(
    ("local", "axes"),
    [
        (lambda x: jnp.tanh(x).sum(axis=0) + x, set()),
        (lambda x: x + lax.axis_index("host"), set()),
        (in_rows, set()),
        (summed("host"), {"host"}),
        (summed(AXES), {"host", "device"}),
        (lambda x: lax.pmax(x, "host") + lax.pmin(x, "device"), {"host", "device"}),
        (lambda x: lax.ppermute(x, "device", [(0, 1)]), {"device"}),
        (lambda x: lax.all_gather(x, "host").sum(axis=0), {"host"}),
        (jax.grad(lambda x: summed("host")(x).sum()), {"host"}),
        (jax.checkpoint(jax.jit(summed("host"))), {"host"}),
        (looped, {"host"}),
        (branching, {"device"}),
        (until_it_is_large, {"host"}),
    ],
    ids=[
        *("none", "index", "vmap", "psum", "both", "pmax and pmin", "ppermute"),
        *("all_gather", "grad", "remat", "scan", "cond", "while"),
    ],
)
def test_traced_axes_equal_the_axes_of_collectives(local, axes):
    """Neither an index along an axis nor an axis of `jax.vmap` exchanges anything."""
    assert collective_axes(on_hosts(local), X) == axes


def test_unconstrained_dimension_names_no_axis():
    mesh = pj.data_mesh(4, axis_name=("host", "tp"), hosts=2)
    place = NamedSharding(mesh, P(P.UNCONSTRAINED, "tp", None, ()))

    def constrained(x):
        return lax.with_sharding_constraint(x, place)

    assert constrained_axes(constrained, jnp.zeros((4, 4, 1, 1))) == {"tp"}

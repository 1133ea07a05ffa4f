"""Tests on which arguments results depend, and which differ between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.sources import differing, reads, sources


@pytest.mark.parametrize(
    ("function", "any_of", "jumps"),
    [
        (lambda x, y: 2 * x, (True, False), (False, False)),
        (lambda x, y: x * jnp.sign(y), (True, True), (False, True)),
        (lambda x, y: jnp.where(y > 0, x, -x), (True, True), (False, True)),
        (lambda x, y: x + jnp.round(y), (True, True), (False, True)),
        (
            lambda x, y: lax.cond(y > 0, lambda: x, lambda: -x),
            (True, True),
            (False, True),
        ),
    ],
)
def test_dependencies_of_a_result_are_found(function, any_of, jumps):
    found = reads(function, 1.0, 2.0)
    assert (found.any, found.jumps) == (any_of, jumps)


def test_update_may_print():
    def printed(g):
        jax.debug.print("norm {}", jnp.sum(g))
        return 2 * g

    (found,) = sources(printed, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert found == {0}


def test_loops_hand_on_the_sources_of_their_carries():
    def loops(a, b, c):
        def turn(carry, x):
            first, second, count = carry
            return (second, first + x, count + 1), x

        (first, second, count), xs = lax.scan(turn, (a, b, 0), jnp.ones(3))
        ends = lax.while_loop(
            lambda x: x[0] < c, lambda x: (x[0] + 1, 2 * x[1]), (0, a)
        )
        return first, second, count, xs, *ends

    both = {0, 1}
    found = sources(loops, 1.0, 2.0, 3)
    assert [{i for i in each if i >= 0} for each in found] == [
        both,
        both,
        set(),
        set(),
        {2},
        {0, 2},
    ]


def test_checkpoint_does_not_join_its_results():
    f = jax.checkpoint(lambda x, y: (jnp.sin(x), y + 1))
    assert sources(f, 1.0, 2.0) == [{0}, {1}]


MESH = pj.data_mesh(4, axis_name=("host", "device"), hosts=2)
AXES = ("host", "device")
DIFFERING = {
    "count": (lambda x, n: n + 1, False),
    "data": (lambda x, n: n + x.sum(), True),
    "place on one axis": (lambda x, n: n + lax.axis_index("host"), True),
    "sum over all devices": (lambda x, n: n + lax.psum(x.sum(), AXES), False),
    "mean over all devices": (lambda x, n: n + lax.pmean(x.sum(), AXES), False),
    "greatest of all devices": (lambda x, n: lax.pmax(x.max(), AXES), False),
    "sum over one axis": (lambda x, n: n + lax.psum(x.sum(), "host"), True),
    "sums over one axis and another": (
        lambda x, n: lax.psum(lax.psum(x.sum(), "host"), AXES),
        False,
    ),
    "all rows": (lambda x, n: lax.all_gather(x, AXES).sum(), False),
    "row of another device": (lambda x, n: lax.ppermute(x, "host", [(0, 1)]), True),
    "branch by data": (lambda x, n: lax.cond(x[0] > 0, lambda: n, lambda: -n), True),
    "branch by a count": (lambda x, n: lax.cond(n > 0, lambda: n, lambda: -n), False),
    "scan beside data": (
        lambda x, n: lax.scan(lambda c, y: ((c[0] + 1, c[1] * y), y), (n, 1.0), x)[0][
            0
        ],
        False,
    ),
    "shape of data": (lambda x, n: n + x.size, False),
    "zeros like data": (lambda x, n: n + jnp.zeros_like(x).sum(), False),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_results_of_different_values_on_devices_are_found(name):
    function, differs = DIFFERING[name]
    found = []

    def local(x, n):
        args = x, n
        found.append(differing(function, args, (True, False), AXES))
        return function(*args)

    program = jax.shard_map(
        local, mesh=MESH, in_specs=(P(AXES), P()), out_specs=P(), check_vma=False
    )
    result = jax.jit(program)(jnp.arange(8.0), 3.0)
    assert found == [differs]
    parts = [np.asarray(x.data) for x in result.addressable_shards]
    if not differs:
        assert all(np.array_equal(x, parts[0]) for x in parts)

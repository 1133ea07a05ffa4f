"""Tests every all-reduce: exact sums, and with a codec the bits of its twin."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._internal.mesh import on_mesh
from pipejax.collectives import Layout

from ..codecs import conformance
from ..grid import grid
from ..helpers import assert_bits_equal
from .cases import (
    ALGORITHMS,
    FLOAT64,
    GRID,
    QUICK,
    RANDOM,
    case,
    every,
    expected,
    in_dtype,
    program,
    run,
    summed,
)

DEVICES = [4, 7, 3, 8, 5, 2, 1]
LENGTHS = [(1, 0), (255, 0), (1000, 0), (997, 3), (0, 4)]
DTYPES = ["float32", "bfloat16", "float16"]
FASTER = {"compiler_options": {"xla_backend_optimization_level": 0}}
EACH = every(GRID)


def rank_coded(devices, n, dtype):
    """Returns i + 1 times 1, 2, ..., 7 on device i: sums are at most 36 x 7 = 252.

    bfloat16 represents all integers up to 256.
    """
    codes = np.outer(np.arange(1, devices + 1), 1 + np.arange(n) % 7)
    return codes.astype(np.float32).astype(dtype)


@grid(1, algorithm=ALGORITHMS, devices=DEVICES)
def test_sum_of_integers_is_exact(algorithm, devices):
    """Sums all layouts in one program, because compilation takes most of the time."""
    layouts = [(n, exact, "float32") for n, exact in LENGTHS]
    layouts += [(255, 3, dtype) for dtype in DTYPES[1:]]
    cases = [case(algorithm, None, devices, *layout) for layout in layouts]

    def local(rows):
        sums = [
            summed(x.layout, x.all_reduce(x.layout, x.axis), row[0])[0][None]
            for x, row in zip(cases, rows, strict=True)
        ]
        return sums

    own = P(cases[0].axis)
    values = [rank_coded(devices, n + exact, dtype) for n, exact, dtype in layouts]
    program = jax.jit(on_mesh(local, cases[0].mesh, own, own), **FASTER)
    for got, x in zip(program(values), values, strict=True):
        dtype = np.float32 if x.dtype == np.float16 else x.dtype
        total = np.asarray(x, np.float32).sum(axis=0).astype(dtype)
        np.testing.assert_array_equal(got, np.tile(total, (devices, 1)), strict=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("axes", [("b", "a"), ("c", "a", "b")])
def test_axes_may_come_in_another_order_than_in_the_mesh(algorithm, axes):
    if algorithm == "hierarchical" and len(axes) == 3:
        pytest.skip("It takes two axes.")
    shape = {"a": 2, "b": 3} if len(axes) == 2 else {"a": 2, "b": 2, "c": 2}
    devices = math.prod(shape.values())
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(*shape.values()), [*shape])
    layout, way = Layout.of_shapes(((8,),)), ALGORITHMS[algorithm]()

    def local(rows):
        return summed(layout, way(layout, axes), rows[0])[0][None]

    values = rank_coded(devices, 8, "float32")
    got = jax.jit(on_mesh(local, mesh, P(axes), P(axes)))(values)
    np.testing.assert_array_equal(got, np.tile(values.sum(axis=0), (devices, 1)))


def check(each, vectors, states=None):
    """Asserts that sum and states equal the twin's, and that all devices agree."""
    got, after = run(each, vectors, states)
    want, others = expected(each, vectors, states)
    np.testing.assert_array_equal(got, want, strict=True)
    assert_bits_equal(after, others)
    np.testing.assert_array_equal(got, np.tile(got[0], (each.devices, 1)))
    return got, after


@EACH
def test_all_reduce_equals_its_twin_bit_for_bit(each):
    """Compares two exchanges bit by bit, the second with the states of the first."""
    _, states = check(each, each.vectors(0))
    check(each, each.vectors(1), states)


@EACH
def test_exact_parts_have_only_rounding_error(each):
    """Exact parts are off by at most p - 1 float32 roundings of the sum of all |x|."""
    vectors = each.vectors(2)
    tail = vectors[:, each.layout.coded_size :].astype(np.float64)
    got = run(each, vectors)[0][:, each.layout.coded_size :]
    bound = (each.devices - 1) * 2.0**-24 * np.abs(tail).sum(axis=0)
    assert (np.abs(got - tail.sum(axis=0)[None]) <= bound[None]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 999, 1001])
@every(GRID[: len(GRID) // 2])
def test_nan_and_infinity_reach_every_device(each, place, bad):
    vectors = each.vectors()
    vectors[1, place] = bad
    got, _ = run(each, vectors)
    if each.codec == "random_k" and place < each.layout.coded_size:
        # The element at this place may not be drawn, but then all drawn elements are
        # NaN.
        assert not np.isfinite(got).all(axis=1).any()
    else:
        assert not np.isfinite(got[:, place]).any()


@EACH
def test_codec_states_are_no_scalars_and_keep_their_form(each):
    found = program(each)
    leaves = jax.tree.leaves(found.init)
    # The first axis is that of the devices.
    assert all(leaf.ndim > 1 for leaf in leaves)
    assert bool(leaves) == ("+" in each.codec or each.codec in RANDOM)
    _, states = run(each, each.vectors())
    jax.tree.map(np.testing.assert_equal, shapes(states), shapes(found.init))


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


@grid(
    1,
    algorithm=[a for a in ALGORITHMS if a != "psum"],
    size=[(1, 255), (2, 1), (5, 255), (7, 1), (8, 255)],
)
def test_all_reduce_equals_its_twin_on_other_numbers_of_devices(algorithm, size):
    devices, n = size
    each = case(algorithm, "int4", devices, n, exact=1)
    check(each, each.vectors())


FAMILIES = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "one large": lambda rng, shape: rng.normal(size=shape) ** 9,
    "all scales": lambda rng, shape: (
        rng.normal(size=shape) * 10.0 ** rng.integers(-20, 20, shape)
    ),
    "sparse": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) < 0.02),
    "integers": lambda rng, shape: rng.integers(-100, 100, shape),
    "equal": lambda rng, shape: np.full(shape, rng.normal()),
    "zero": lambda rng, shape: np.zeros(shape),
    "huge": lambda rng, shape: 5e37 * rng.normal(size=shape),  # sums overflow
}


# The programs are compiled already. There are thirty cases, and fifty times as many in
# a soak.
@pytest.mark.parametrize("cases", [QUICK, pytest.param(GRID, marks=pytest.mark.full)])
@settings(max_examples=10 * settings.default.max_examples)
@given(
    data=st.data(),
    families=st.lists(st.sampled_from(sorted(FAMILIES)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_reduce_equals_its_twin_on_values_of_all_kinds(cases, data, families, seed):
    """Gives devices values of different kinds, in two exchanges one after another."""
    if "float64" in conformance.DTYPES:
        cases = cases + [x for x in FLOAT64 if in_dtype(x, "float32") in cases]
    each = data.draw(st.sampled_from(cases))
    rng, states = np.random.default_rng(seed), None
    for _ in range(2):
        shape = each.vectors().shape
        rows = [
            FAMILIES[families[i % len(families)]](rng, shape[1:])
            for i in range(each.devices)
        ]
        _, states = check(each, np.stack(rows).astype(each.dtype), states)

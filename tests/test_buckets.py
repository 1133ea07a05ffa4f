"""Pytrees to flat vectors and back, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import buckets

from .helpers import assert_bits_equal

BF16 = jnp.bfloat16


def mixed():
    """Leaves of two dtypes and of every rank, a scalar and an empty one among them."""
    rng = np.random.default_rng(0)
    leaf = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "b": [leaf(2, 3), leaf(4).astype(BF16)],
        "a": (leaf(), leaf(0, 5), leaf(1, 2, 2).astype(BF16)),
        "c": None,
    }


TREES = {
    "mixed": mixed(),
    "one dtype": {"w": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)},
    "scalar": np.float32(3),
    "leaf": np.arange(6, dtype=np.float32).reshape(2, 3),
    "integers": {"i": np.arange(3), "f": np.ones(2, np.float32)},
    "none": {"a": None, "b": ()},
}


def flatten_ref(tree, dtype=None):
    """`buckets.flatten` in NumPy: leaves in tree order, each in its dtype's vector."""
    out = {}
    for leaf in jax.tree.leaves(tree):
        name = np.dtype(leaf.dtype if dtype is None else dtype).name
        out.setdefault(name, []).append(np.ravel(leaf).astype(name))
    return {name: np.concatenate(pieces) for name, pieces in out.items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_flatten_is_its_twin_and_unflatten_its_inverse(name, compiled):
    tree = jax.tree.map(jnp.asarray, TREES[name])
    flat = (jax.jit(buckets.flatten) if compiled else buckets.flatten)(tree)
    assert_bits_equal(flat, flatten_ref(tree))
    back = (jax.jit(buckets.unflatten) if compiled else buckets.unflatten)(flat, tree)
    assert_bits_equal(back, tree)


@pytest.mark.parametrize("dtype", [BF16, np.float32, "float16"])
def test_one_bucket_in_a_dtype_of_its_own(dtype):
    tree = mixed()
    flat = buckets.flatten(tree, dtype)
    assert_bits_equal(flat, flatten_ref(tree, dtype))
    assert list(flat) == [np.dtype(dtype).name]
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), tree)
    assert_bits_equal(buckets.unflatten(flat, tree, dtype), rounded)


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("name", TREES)
def test_sizes_without_computing(name, dtype):
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TREES[name]))
    flat = flatten_ref(jax.tree.map(jnp.asarray, TREES[name]), dtype)
    assert buckets.sizes(shapes, dtype) == {k: v.size for k, v in flat.items()}


def test_what_is_left_over_is_not_looked_at():
    first = {"a": np.arange(3, dtype=np.float32)}
    flat = buckets.flatten((first, {"b": np.full(2, np.nan, np.float32)}))
    assert_bits_equal(buckets.unflatten(flat, first), first)


def test_order_is_that_of_the_tree():
    tree = {"z": np.float32(3), "a": np.float32(1), "m": (np.float32(2),)}
    np.testing.assert_array_equal(buckets.flatten(tree)["float32"], [1, 2, 3])


def test_every_bit_travels():
    """Infinities, NaNs with their payload, denormals, negative zero."""
    bits = np.array(
        [0x7F800000, 0xFF800000, 0x7FC12345, 0x00000001, 0x80000000, 0x7F7FFFFF],
        np.uint32,
    )
    tree = {"a": bits[:2].view(np.float32), "b": bits[2:].view(np.float32)}
    flat = jax.jit(buckets.flatten)(tree)
    np.testing.assert_array_equal(np.asarray(flat["float32"]).view(np.uint32), bits)
    back = jax.jit(buckets.unflatten)(flat, tree)
    np.testing.assert_array_equal(np.asarray(back["b"]).view(np.uint32), bits[2:])


def test_differentiable():
    """Its transpose is `unflatten`: the gradient of a weighted sum is the weights."""
    tree = {"w": jnp.ones((2, 2)), "b": jnp.ones(3)}
    weights = jnp.arange(7.0)

    def total(tree):
        return buckets.flatten(tree)["float32"] @ weights

    assert_bits_equal(
        jax.jit(jax.grad(total))(tree), buckets.unflatten({"float32": weights}, tree)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [7, 4096, 100_003])
def test_all_finite_sees_every_element(n, bad):
    """A maximum would not: XLA's loses NaN on CPUs, of 4,096 elements or more."""
    see = jax.jit(lambda x: buckets.all_finite({"float32": x}, {"float32": n}))
    x = np.ones(n + 1, np.float32)
    x[n] = bad  # not to be looked at
    assert see(x)
    for place in (0, n // 3, n - 1):
        y = np.array(x)
        y[place] = bad
        assert not see(y)

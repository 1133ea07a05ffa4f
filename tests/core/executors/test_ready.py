"""Tests when gradients are computed, against FLOPs counted by hand."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import pipejax as pj

SIZES = (4, 8, 16, 2)
BATCH = jax.ShapeDtypeStruct((6, SIZES[0]), jnp.float32)


def loss_fn(params, batch):
    x = batch
    for name in ("a", "b", "c"):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def params():
    pairs = itertools.pairwise(SIZES)
    names = zip("abc", pairs, strict=True)
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in names}


def expected():
    """Returns the shares of a pass forward and one back, layer by layer."""
    a, b, c = (n * m for n, m in itertools.pairwise(SIZES))
    # A layer has a product forward, and two back but for the first layer. Which of the
    # two comes first is up to JAX.
    total = 3 * (a + b + c) - a
    forward = a + b + c
    ends = {"c": forward + 2 * c, "b": forward + 2 * c + 2 * b, "a": total}
    products = {"c": c, "b": b, "a": 0}
    return {
        name: ((ends[name] - products[name]) / total, ends[name] / total)
        for name in "abc"
    }


@pytest.mark.parametrize(
    "settings", [{}, {"width": 1}, {"delayed": {"a": True, "b": False, "c": False}}]
)
def test_shares_equal_a_count_by_hand(settings):
    train = pj.make_train_step(
        loss_fn, optax.adam(0.1), mesh=pj.data_mesh(2), **settings
    )
    found = train.ready_after(train.abstract_state(params()), BATCH)
    for name, (least, most) in expected().items():
        assert least - 1e-9 <= found[name] <= most + 1e-9, name
    assert found["c"] < found["b"] < found["a"] == pytest.approx(1)


def test_frozen_parameter_has_no_time():
    tx = optax.partition(
        {"moves": optax.adam(0.1), "stays": optax.set_to_zero()},
        {"a": "stays", "b": "moves", "c": "moves"},
    )
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(2))
    found = train.ready_after(train.abstract_state(params()), BATCH)
    assert found["a"] is None
    assert found["b"] == pytest.approx(1)


def test_microbatches_have_all_gradients_at_the_end():
    train = pj.make_train_step(
        loss_fn, optax.adam(0.1), mesh=pj.data_mesh(1), microbatches=3
    )
    found = train.ready_after(train.abstract_state(params()), BATCH)
    assert jax.tree.leaves(found) == [1, 1, 1]

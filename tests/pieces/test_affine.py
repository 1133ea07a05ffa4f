"""Tests which arguments an update is affine in, for optimizers that are known."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pipejax.pieces import not_affine

PARAMS = {"w": jnp.zeros(3)}


def bent(tx):
    """Returns the names of the leaves of the state in which an update is not affine."""
    state = tx.init(PARAMS)

    def update(state, params, gradients):
        return tx.update(gradients, state, params)

    found = not_affine(update, state, PARAMS, PARAMS)
    paths = jax.tree_util.tree_leaves_with_path((state, PARAMS))
    pairs = zip(paths, found, strict=False)
    arrays = [(path, is_bent) for (path, leaf), is_bent in pairs if leaf.shape == (3,)]
    return [str(path[-2]) if len(path) > 2 else "params" for path, x in arrays if x]


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (optax.sgd(0.1), []),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)), []),
        (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), []),
        (optax.adamw(1e-3), [".nu"]),
        (optax.lion(1e-3), [".mu"]),
        (optax.adabelief(1e-3), [".mu", ".nu"]),
        (optax.rmsprop(0.1), [".nu"]),
        (optax.apply_if_finite(optax.adam(1e-3), 3), [".nu"]),
    ],
)
def test_of_optimizers(tx, names):
    assert bent(tx) == names


def test_a_norm_of_the_parameters_is_not_affine_in_them():
    assert "params" in bent(optax.lamb(1e-3))


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, y: x + 2 * y, [False, False]),
        (lambda x, y: x * y, [False, False]),
        (lambda x, y: x * (x + y), [True, False]),
        (lambda x, y: x / y, [False, True]),
        (lambda x, y: jnp.where(x > 0, y, 2 * y), [True, False]),
        (lambda x, y: jax.nn.relu(x) + y, [True, False]),
        (lambda x, y: x.astype(jnp.int32) + y, [True, False]),
        (lambda x, y: jax.lax.cond(True, lambda: x, lambda: y * y), [False, True]),
    ],
)
def test_of_operations(function, found):
    assert not_affine(function, 1.0, 1.0) == found

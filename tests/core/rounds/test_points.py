"""Tests which leaves of an optimizer's state are points, and that they move."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax._core.rounds import moved, points_of

from ...helpers import init_params, loss_fn


def with_ema(tx):
    def init(params):
        return tx.init(params), jax.tree.map(jnp.copy, params)

    def update(gradients, state, params):
        updates, inner = tx.update(gradients, state[0], params)
        return updates, (inner, optax.incremental_update(params, state[1], 0.1))

    return optax.GradientTransformation(init, update)


FREE = optax.contrib.schedule_free_sgd(0.1)


@pytest.mark.parametrize(
    ("tx", "field"),
    [
        (FREE, "z"),
        (optax.MultiSteps(FREE, 2), "z"),
        (with_ema(FREE), "z"),
        (optax.contrib.madgrad(0.1), "x0"),
        (optax.contrib.prodigy(), "params0"),
        (with_ema(optax.sgd(0.1, momentum=0.9)), None),
        (optax.adamw(0.1), None),
        (optax.identity(), None),
    ],
)
def test_copies_behind_updates_are_points(tx, field):
    params = init_params()
    train = pj.make_local_step(loss_fn, tx, mesh=pj.data_mesh(1))
    form = train.abstract_state(params).shared.form
    points = points_of(tx, form, tx.init(params))
    found = jax.tree_util.tree_leaves_with_path(points)
    fields = {str(entry) for path, _ in found for entry in path}
    assert len(found) == (len(params) if field else 0)
    assert (f".{field}" in fields) == (field is not None)


def test_points_move_as_their_parameters():
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    points = (None, {"a": jnp.zeros(2, jnp.bfloat16), "b": None})
    found = moved(points, params, {"a": jnp.full(2, 0.5), "b": jnp.ones(3)})
    assert found[0] is None
    assert found[1]["b"] is None
    assert found[1]["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[1]["a"], [0.5, 0.5])

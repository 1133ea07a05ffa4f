"""Tests the deviations of gradients from their mean, which predictions may use."""

import jax
import numpy as np
import optax
import pytest

import pipejax as pj

from ...helpers import batches, init_params, loss_fn


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_deviations_sum_to_zero_and_end_with_the_drain(executor):
    train = pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=pj.data_mesh(4),
        deviation_feedback=0.5,
        weight_prediction="own",
        executor=executor,
    )
    state, kept = train.init(init_params()), []
    for batch in batches(4):
        state, _ = train.step(state, batch)
        kept.append(by_device(state.in_flight.deviation))
    assert not kept[0].any()  # nothing has arrived yet
    for own in kept[1:]:
        assert np.abs(own).max() > 1e-3
        np.testing.assert_allclose(own.sum(axis=0), 0, atol=1e-6)
    assert not by_device(train.drain(state)[0].in_flight.deviation).any()


def by_device(gradients):
    """Returns the gradients as one vector for each of four devices."""
    rows = [np.asarray(leaf).reshape(4, -1) for leaf in jax.tree.leaves(gradients)]
    return np.concatenate(rows, axis=1)


def test_deviation_is_kept_only_with_feedback():
    for width, feedback in ((1, 0.5), (2, 0.0)):
        train = pj.make_train_step(
            loss_fn,
            optax.sgd(0.1),
            mesh=pj.data_mesh(2),
            width=width,
            deviation_feedback=feedback,
            weight_prediction="own",
        )
        assert train.init(init_params()).in_flight.deviation is None


def weighted(w, batch):
    return w * batch["x"].mean(), pj.Aux(weight=batch["n"].sum())


@pytest.mark.parametrize(
    ("weights", "deviation"),
    [
        ([1, 1], [1 - 3, 5 - 3]),
        ([1, 3], [1 - 4, 5 - 4]),  # the mean of 1, 5, 5 and 5
    ],
)
def test_deviation_equals_numbers_by_hand(weights, deviation):
    """Two devices have the gradients 1 and 5; then one of them is not finite."""
    train = pj.make_train_step(
        weighted,
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        deviation_feedback=0.5,
        weight_prediction="own",
    )
    batch = {"x": np.float32([1, 5]), "n": np.float32(weights)}
    state, found = train.init(np.float32(1), batch=batch), []
    for x in (batch, batch | {"x": np.float32([1, np.nan])}, batch):
        state, _ = train.step(state, x)
        found.append(state.in_flight.deviation.tolist())
    assert found == [[0, 0], deviation, [0, 0]]

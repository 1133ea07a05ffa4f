"""Tests model state that is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from ..helpers import batches, init_params, loss_fn

MASK = np.array([0.0, -np.inf], np.float32)


def masked(params, batch, *, model_state):
    """Returns its mask unchanged, and counts in another leaf."""
    loss = loss_fn(params, batch) + 0 * jnp.exp(model_state["mask"]).sum()
    after = {"mask": model_state["mask"], "mean": model_state["mean"] + 1}
    return loss, pj.Aux(model_state=after)


def checkpointed(params, batch, *, model_state):
    def run(params, model_state):
        return masked(params, batch, model_state=model_state)

    return jax.checkpoint(run)(params, model_state)


def running(params, batch, *, model_state):
    largest = jnp.maximum(model_state["largest"], batch["x"].max())
    return loss_fn(params, batch), pj.Aux(model_state={"largest": largest})


@pytest.mark.parametrize(
    ("loss", "executor", "width", "microbatches"),
    [
        (masked, "fused", 1, 1),
        (masked, "host", 2, 2),
        (checkpointed, "fused", 2, 1),
        pytest.param(masked, "fused", 2, 2, marks=pytest.mark.full),
        pytest.param(masked, "host", 1, 1, marks=pytest.mark.full),
    ],
)
def test_leaves_unchanged_by_the_loss_may_hold_infinity(
    loss, executor, width, microbatches
):
    train = pj.make_train_step(
        loss,
        optax.adam(1e-2),
        mesh=pj.data_mesh(4),
        width=width,
        microbatches=microbatches,
        executor=executor,
    )
    state = train.init(
        init_params(),
        model_state={"mask": MASK, "mean": np.zeros(2)},
        batch=batches(1)[0],
    )
    for batch in batches(3):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    assert int(state.skipped) == 0
    np.testing.assert_array_equal(state.model_state["mask"], MASK)
    np.testing.assert_array_equal(state.model_state["mean"], 3.0 * microbatches)


@pytest.mark.parametrize("start", [-np.inf, np.nan])
def test_changed_leaves_must_be_finite_at_the_start(start):
    train = pj.make_train_step(running, optax.sgd(0.1), mesh=pj.data_mesh(4))
    (batch,) = batches(1)
    message = r"`model_state\['largest'\]` with an infinity .* Start it at a number"
    model_state = {"largest": np.float32(start)}
    with pytest.raises(ValueError, match=message):
        train.init(init_params(), model_state=model_state, batch=batch)
    with pytest.raises(ValueError, match=r"`batch` must be given .* not finite"):
        train.init(init_params(), model_state=model_state)
    state = train.init(init_params(), model_state={"largest": np.float32(-9)})
    for each in batches(3):
        state, _ = train.step(state, each)
    assert int(state.skipped) == 0


def test_later_infinity_is_skipped_and_counted():
    train = pj.make_train_step(running, optax.sgd(0.1), mesh=pj.data_mesh(4), width=1)
    state = train.init(init_params(), model_state={"largest": np.float32(0)})
    data = batches(3)
    data[1]["x"][3, 0] = np.inf
    skipped = []
    for batch in data:
        state, _ = train.step(state, batch)
        skipped.append(int(state.skipped))
    assert skipped == [0, 1, 1]
    assert np.isfinite(state.model_state["largest"])


def test_every_new_model_state_is_checked():
    train = pj.make_train_step(masked, optax.sgd(0.1), mesh=pj.data_mesh(4))
    (batch,) = batches(1)
    model_state = {"mask": MASK, "mean": np.zeros(2)}
    state = train.init(init_params(), model_state=model_state, batch=batch)
    assert state.calls is None
    jitted, _ = jax.jit(train.step)(state, batch)
    assert int(jitted.skipped) == 0
    model_state |= {"mean": np.full(2, np.inf)}
    with pytest.raises(ValueError, match="`model_state` must be finite where"):
        train.init(init_params(), model_state=model_state, batch=batch)


def test_shapes_of_a_batch_show_changes_of_the_loss():
    train = pj.make_train_step(masked, optax.sgd(0.1), mesh=pj.data_mesh(4))
    batch = jax.eval_shape(lambda: batches(1)[0])
    model_state = {"mask": MASK, "mean": np.zeros(2)}
    state = train.init(init_params(), model_state=model_state, batch=batch)
    np.testing.assert_array_equal(state.model_state["mask"], MASK)

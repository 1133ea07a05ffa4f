"""An NNX model with batch norm and dropout, split, trained and updated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pipejax as pj
import pipejax.flax.nnx

from ..helpers import assert_bits_equal
from .test_linen import CHANCE, TX, batch_at, raw, run


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.List([nnx.Linear(5, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden[0](x)))))


def loss_fn(model, batch):
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def fresh():
    return Model(rngs=nnx.Rngs(params=0, dropout=1))


def start(model, rng=None, devices=4):
    pure_loss_fn, params, model_state = pj.flax.nnx.split(model, loss_fn)
    train = pj.make_train_step(pure_loss_fn, TX, mesh=pj.data_mesh(devices), width=2)
    state = train.init(params, model_state=model_state, rng=rng, batch=batch_at(0))
    return train, state


def values(model):
    return nnx.to_pure_dict(nnx.state(model))


def test_a_model_is_trained_and_updated_in_place():
    model = fresh()
    train, state = start(model, jax.random.key(2))
    state, losses = run(train, state)
    assert np.isnan(losses[0]), "nothing arrives in the first step of width 2"
    assert losses[1] > 0.8 * CHANCE
    assert np.mean(losses[-5:]) < 0.5 * CHANCE
    assert_bits_equal(raw(values(model)), raw(values(fresh())))

    state, _ = train.drain(state)
    kernel = model.out.kernel
    pj.flax.nnx.update(model, state)
    assert model.out.kernel is kernel, "updated in place"
    assert_bits_equal(model.out.kernel[...], state.params["out"]["kernel"])
    assert_bits_equal(model.norm.mean[...], state.model_state["norm"]["mean"])
    model.eval()
    test = batch_at(10_000, size=512)
    hits = np.asarray(model(test["x"])).argmax(-1) == test["y"]
    assert hits.mean() > 0.75


@pytest.mark.parametrize("rng", [None, jax.random.key(2)])
def test_equals_the_same_model_called_by_hand(rng):
    """`nnx.merge` and `nnx.split` written out in the loss."""
    graph, params, keys, stats = nnx.split(fresh(), nnx.Param, nnx.RngState, ...)

    def by_hand(params, batch, *, model_state, rng=None):
        keys, stats = model_state
        given = keys
        if rng is not None:
            key = jax.random.split(rng, 1)[0]
            # What `nnx.reseed` makes of it: the stream's own first key.
            key, count = jax.random.fold_in(key, 0), jnp.zeros((), jnp.uint32)
            given = {"dropout": {"rngs": {"key": key, "count": count}}}
        model = nnx.merge(graph, params, given, stats)
        loss, metrics = loss_fn(model, batch)
        _, _, after, stats = nnx.split(model, nnx.Param, nnx.RngState, ...)
        after = nnx.to_pure_dict(after) if rng is None else keys
        return loss, pj.Aux(metrics, (after, nnx.to_pure_dict(stats)))

    train = pj.make_train_step(by_hand, TX, mesh=pj.data_mesh(4), width=2)
    by_hand_state = train.init(
        nnx.to_pure_dict(params),
        model_state=(nnx.to_pure_dict(keys), nnx.to_pure_dict(stats)),
        rng=rng,
        batch=batch_at(0),
    )
    expected, expected_losses = run(train, by_hand_state, 5)
    state, losses = run(*start(fresh(), rng), 5)
    np.testing.assert_array_equal(losses, expected_losses)
    assert_bits_equal(state.params, expected.params)
    assert_bits_equal(
        state.model_state["norm"]["mean"], expected.model_state[1]["norm"]["mean"]
    )


class Noise(nnx.Module):
    """Its loss is the mean of what its two random streams draw."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.rngs = rngs

    def __call__(self, x):
        return self.scale * (self.rngs.a.normal(x.shape) + self.rngs.b.normal(x.shape))


def draws(rng, steps=3, devices=4):
    """What each device drew in each step, [steps, devices], and the state after."""
    model = Noise(rngs=nnx.Rngs(a=0, b=1))

    def noise(model, batch):
        drawn = model(batch).mean()
        # One-hot by device, so that the mean over devices keeps them apart.
        here = jnp.arange(devices) == jax.lax.axis_index("data")
        return drawn, list(jnp.where(here, drawn, 0.0) * devices)

    loss, params, model_state = pj.flax.nnx.split(model, noise)
    train = pj.make_train_step(
        loss, optax.sgd(0.0), mesh=pj.data_mesh(devices), width=1
    )
    batch = np.zeros((devices, 2), np.float32)
    state = train.init(params, model_state=model_state, rng=rng, batch=batch)
    out = []
    for _ in range(steps):
        state, info = train.step(state, batch)
        out.append(np.asarray(info.metrics))
    return np.stack(out), state, model_state


def test_with_a_key_every_device_and_step_draws_its_own():
    drawn, state, given = draws(jax.random.key(3))
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(drawn, draws(jax.random.key(3))[0])
    assert not np.isin(drawn, draws(jax.random.key(4))[0]).any()
    assert_bits_equal(raw(state.model_state), raw(given))
    assert len(set(pj.replica_digest(state).values())) == 1


def test_without_a_key_the_streams_run_on_alike_on_every_device():
    drawn, state, given = draws(None)
    assert (drawn == drawn[:, :1]).all()
    assert len(np.unique(drawn)) == len(drawn)
    count = state.model_state["rngs"]["a"]["count"]
    assert int(count) == int(given["rngs"]["a"]["count"]) + 3
    assert len(set(pj.replica_digest(state).values())) == 1


@pytest.mark.parametrize("rng", [None, jax.random.key(0)])
def test_a_model_without_state(rng):
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    loss, params, model_state = pj.flax.nnx.split(
        model, lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    )
    assert model_state == {}
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(4), width=1)
    state, _ = train.step(
        train.init(params, model_state=model_state, rng=rng), batch_at(0)
    )
    pj.flax.nnx.update(model, state)
    assert_bits_equal(model.kernel[...], state.params["kernel"])


def test_streams_of_layers_stacked_by_vmap():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return nnx.Dropout(0.5, rngs=rngs)

    class Stacked(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.layers = stack(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(
                self.layers, x * self.scale
            )

    loss, params, model_state = pj.flax.nnx.split(
        Stacked(rngs=nnx.Rngs(0)), lambda model, batch: model(batch["x"]).mean()
    )
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2), width=1)
    state = train.init(params, model_state=model_state, rng=jax.random.key(0))
    after, info = train.step(state, batch_at(0))
    assert np.isfinite(info.loss)
    assert_bits_equal(raw(after.model_state), raw(model_state))


def test_gradients_in_flight_are_not_lost():
    model = fresh()
    train, state = start(model)
    state, _ = train.step(state, batch_at(0))
    message = r"got 1 computed .* `state, _ = train.drain\(state\)`"
    with pytest.raises(ValueError, match=message):
        pj.flax.nnx.update(model, state)

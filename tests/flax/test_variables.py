"""Tests how variables of NNX models become arrays, and which of them may change."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import pipejax as pj
import pipejax.flax.nnx

from ..helpers import assert_bits_equal
from .test_linen import batch_at


class Stacked(nnx.Module):
    """Layers with frozen weights, adapters and dropout, stacked for a scan."""

    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.base = nnx.Linear(5, 5, rngs=rngs)
        self.adapter = nnx.LoRA(5, 2, 5, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.base(x) + self.adapter(x)))


def through(layers, x):
    one = nnx.remat(lambda layer, x: layer(x))
    return nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)


def test_frozen_variables_of_a_scan_with_checkpoints_are_not_sent():
    """They come back as other arrays, and so do random streams that are not drawn."""
    keys = jax.random.split(jax.random.key(0), 3)
    model, batch = nnx.vmap(Stacked)(keys), np.ones((4, 5), np.float32)
    loss, params, model_state = pj.flax.nnx.split(
        model, lambda layers, x: jnp.mean(through(layers, x) ** 2), wrt=nnx.LoRAParam
    )
    train = pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(2))
    state = train.init(params, model_state=model_state, batch=batch)
    for _ in range(2):
        state, _ = train.step(state, batch)
        assert not jax.tree.leaves(state.in_flight.pending[0].changes)
    state, _ = train.drain(state)
    assert_bits_equal(state.model_state["base"], model_state["base"])
    assert not np.array_equal(
        state.params["adapter"]["lora_b"], params["adapter"]["lora_b"]
    )


class Normalized(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.WeightNorm(nnx.Linear(5, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


def clipping(model, batch):
    model.kernel[...] = jnp.clip(model.kernel[...], -0.1, 0.1)
    return jnp.mean(model(batch["x"]) ** 2)


@pytest.mark.parametrize(
    ("model", "loss", "name"),
    [
        (Normalized, lambda model, batch: model(batch["x"]).mean(), "kernel"),
        (lambda rngs: nnx.Linear(5, 3, rngs=rngs), clipping, "kernel"),
    ],
)
def test_loss_with_an_assignment_to_a_trained_variable_is_refused(model, loss, name):
    pure, params, model_state = pj.flax.nnx.split(model(rngs=nnx.Rngs(0)), loss)
    train = pj.make_train_step(pure, optax.sgd(0.1), mesh=pj.data_mesh(2))
    state = train.init(params, model_state=model_state)
    message = rf"`loss_fn` must leave the variables that are trained .*\['{name}'\]"
    with pytest.raises(ValueError, match=message):
        train.step(state, batch_at(0))


def test_model_inside_jit_and_checkpoints_is_trained():
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))

    @nnx.jit
    @nnx.remat
    def logits(model, x):
        return model(x)

    found = []
    for call in (logits, lambda model, x: model(x)):
        pure, params, model_state = pj.flax.nnx.split(
            model, lambda m, batch, call=call: jnp.mean(call(m, batch["x"]) ** 2)
        )
        train = pj.make_train_step(pure, optax.sgd(0.1), mesh=pj.data_mesh(2))
        state, _ = train.step(train.init(params, model_state=model_state), batch_at(0))
        found.append(jax.device_get(train.drain(state)[0].params))
    chex.assert_trees_all_close(*found, rtol=1e-6)


class Positive(nnx.Param):
    def get_value(self, **index):
        return jax.nn.softplus(super().get_value(**index))


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = Positive(jnp.zeros((1, 3)))

    def __call__(self, x):
        return x[:, :3] * self.scale[...]


def test_variable_is_split_as_kept_and_not_as_read():
    model = Scaled()
    pure, params, _ = pj.flax.nnx.split(model, lambda m, x: jnp.mean(m(x)))
    assert params["scale"].tolist() == [[0, 0, 0]]
    x = jnp.ones((2, 5))
    np.testing.assert_allclose(pure(params, x, model_state={})[0], np.log(2), 1e-6)


def test_variable_with_a_dict_is_refused():
    class Holder(nnx.Module):
        def __init__(self):
            self.pair = nnx.Param({"w": jnp.ones(2), "b": jnp.ones(2)})

    with pytest.raises(ValueError, match=r"`model` must hold an array, .*in pair\."):
        pj.flax.nnx.split(Holder(), lambda model, batch: jnp.ones(()))

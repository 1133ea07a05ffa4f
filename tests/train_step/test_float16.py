"""Tests gradients that travel as float16, whose sum float16 cannot hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives

from ..grid import grid
from ..helpers import assert_bits_equal

DEVICES = 4
RATE = 2.0**-8
WAYS = {
    "float16": {"reduce_dtype": jnp.float16},
    "as the parameters": {"param_dtype": jnp.float16},
    "two_shot": {"all_reduce": collectives.two_shot(codecs.cast("float16"))},
    "ring": {"all_reduce": collectives.ring(codecs.cast("float16"))},
    "ring of float16": {
        "reduce_dtype": jnp.float16,
        "all_reduce": collectives.ring(),
    },
}


# Tests share train steps, and with them traced programs.
@functools.cache
def make(*, param_dtype=jnp.float32, devices=DEVICES, **settings):
    """Returns a step and its state. The gradients are the batch's means."""

    def loss_fn(w, batch):
        return jnp.vdot(w.astype(jnp.float32), batch.mean(axis=0))

    mesh = pj.data_mesh(devices)
    train = pj.make_train_step(loss_fn, optax.sgd(RATE), mesh=mesh, **settings)
    return train, train.init(jnp.zeros(2, param_dtype))


def batch_of(*rows):
    return np.float32([[row, 1.0] for row in rows])


HALF = codecs.cast("float16")
CAST = {
    "two_shot": lambda: collectives.two_shot(HALF),
    "ring, fed back": lambda: collectives.ring(codecs.error_feedback(HALF)),
    "all of them": lambda: collectives.two_shot(codecs.top_k(1, values=HALF)),
}


@pytest.mark.filterwarnings("ignore:TopK is biased")
@grid(1, way=CAST, tokens=[2.0**16, 1e-6], executor=["fused", "host"], sharded=[0, 1])
def test_weight_does_not_leave_the_range_of_a_codec(way, tokens, executor, sharded):
    """The products of gradients and weights would be infinite, or zero."""

    def loss_fn(w, batch):
        loss = jnp.vdot(w, batch.mean(axis=0))
        return loss, pj.Aux(weight=jnp.float32(tokens) * batch[:, 1].sum())

    settings = {"executor": "auto" if sharded else executor}
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(RATE),
        mesh=pj.data_mesh(DEVICES),
        width=2,
        weight_prediction=False,
        all_reduce=CAST[way](),
        shard_optimizer=bool(sharded),
        **settings,
    )
    batch = batch_of(17408, 16384, 17408, 16384)
    state = train.init(jnp.zeros(2), batch=batch)
    state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    assert state.skipped == 0
    found = np.asarray(train.whole_params(state))
    np.testing.assert_allclose(found, -RATE * batch.mean(axis=0), rtol=1e-3)


@grid(1, way=WAYS, executor=["fused", "host"], width=[1, 2, 3], predicts=[False, True])
def test_float16_mean_is_applied_exactly(way, executor, width, predicts):
    """Numbers and means are exact in float16, so the parameters are as by hand."""
    settings = {"weight_prediction": predicts and width > 1, **WAYS[way]}
    if settings["weight_prediction"] and width == 2:
        settings |= {"weight_prediction": "own"}
    train, state = make(width=width, executor=executor, **settings)
    batches = [batch_of(17408, 16384, 17408, 16384), batch_of(40960, 0, 0, 40960)]
    wanted = np.float32([0, 0])
    for batch in (*batches, *batches):
        state, _ = train.step(state, batch)
        wanted = wanted - np.float32(RATE) * batch.mean(axis=0)
    state, _ = train.drain(state)
    assert state.skipped == 0
    assert_bits_equal(np.asarray(state.params, np.float32), wanted)


def test_codec_has_room_for_devices_added_up_before():
    """Gradients are copied to one CPU device, as from the GPUs of a process."""
    all_reduce = collectives.two_shot(codecs.cast("float16"))
    train = pj.make_train_step(
        lambda w, batch: jnp.vdot(w, batch.mean(axis=0)),
        optax.sgd(RATE),
        mesh=pj.data_mesh(DEVICES),
        executor="host",
        all_reduce=all_reduce,
    )
    one = jax.sharding.Mesh(np.array(jax.devices()[7:]), ("data",))
    train.executor.__dict__["reduction_mesh"] = one  # cached_property stores it here
    state, batch = train.init(jnp.zeros(2)), batch_of(40960, 0, 0, 40960)
    state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    assert state.skipped == 0
    assert_bits_equal(state.params, -RATE * batch.mean(axis=0))


@pytest.mark.parametrize("width", [1, 2])
def test_gradient_beyond_float16_is_skipped(width):
    train, state = make(width=width, reduce_dtype=jnp.float16)
    state, _ = train.step(state, batch_of(70000, 0, 0, 0))
    state, _ = train.drain(state)
    assert state.skipped == 1
    assert_bits_equal(state.params, jnp.zeros(2))


def test_small_gradients_are_rounded_by_the_headroom():
    """With 4 devices, that is 4 times 2^-24."""
    train, state = make(width=1, reduce_dtype=jnp.float16)
    small = [2.0**-22, 2.0**-23, 3 * 2.0**-24, 2.0**-20]
    state, _ = train.step(state, batch_of(*small))
    # The second lies halfway between 0 and 2^-22, and the third is closer to 2^-22.
    wanted = (2.0**-22 + 0 + 2.0**-22 + 2.0**-20) / DEVICES
    assert state.params[0] == -RATE * wanted


@pytest.mark.parametrize("width", [1, 2])
def test_changes_of_model_state_have_the_same_headroom(width):
    def loss_fn(w, batch, *, model_state):
        moved = model_state + batch.mean()
        return w * batch.mean(), pj.Aux(model_state=moved)

    train = pj.make_train_step(
        loss_fn,
        optax.sgd(RATE),
        mesh=pj.data_mesh(DEVICES),
        width=width,
        reduce_dtype=jnp.float16,
    )
    state = train.init(jnp.float32(0), model_state=jnp.float32(1))
    state, _ = train.step(state, np.float32([17024, 16992, 17024, 16992]))
    state, _ = train.drain(state)
    assert state.model_state == 17009


def test_pipelined_loop_in_float16_has_the_same_means():
    """The hand-written loop of `pipelined` gets the same means."""
    mesh = pj.data_mesh(DEVICES)
    tx = pj.pipelined(optax.sgd(RATE), "data", width=2, reduce_dtype=jnp.float16)
    own = jax.sharding.PartitionSpec("data")
    everywhere = jax.sharding.PartitionSpec()
    specs = pj.state_specs(jax.eval_shape(tx.init, jnp.zeros(2)), "data")

    def step(w, opt_state, batch):
        updates, opt_state = tx.update(batch[0], opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(everywhere, specs, own),
            out_specs=(everywhere, specs),
            check_vma=False,
        )
    )
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=everywhere, out_specs=specs, check_vma=False
    )
    w = jnp.zeros(2)
    opt_state = jax.jit(init)(w)
    for _ in range(2):
        w, opt_state = run(w, opt_state, batch_of(17024, 16992, 17024, 16992))
    assert_bits_equal(w, -np.float32(RATE) * np.float32([17008, 1]))

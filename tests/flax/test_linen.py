"""Tests a Linen model with batch norm and dropout, from a `TrainState` and back."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct
from flax.core import FrozenDict, freeze
from flax.jax_utils import replicate, unreplicate
from flax.linen import fp8_ops
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import pipejax as pj
import pipejax.flax.linen

from ..grid import grid
from ..helpers import assert_bits_equal
from . import twin

TX = optax.adam(3e-2)
STEPS = 40
CHANCE = np.log(3)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x)))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(x))


class State(TrainState):
    batch_stats: Any


def loss_fn(params, batch, *, model_state, rng):
    logits, model_state = Model().apply(
        {"params": params, **model_state},
        batch["x"],
        train=True,
        rngs={"dropout": rng},
        mutable=["batch_stats"],
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    hits = (logits.argmax(-1) == batch["y"]).mean()
    return loss, pj.Aux(metrics={"accuracy": hits}, model_state=model_state)


def batch_at(step, size=64):
    """Returns three classes: the class is the largest of the first three features."""
    x = np.random.default_rng(step).normal(size=(size, 5)).astype(np.float32)
    return {"x": x, "y": x[:, :3].argmax(-1)}


def test_shared_input_reaches_the_loss():
    """The temperature of the logits changes from step to step."""
    net = nn.Dense(3)

    def loss(params, batch, *, shared):
        logits = net.apply({"params": params}, batch["x"]) / shared
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), pj.Aux(metrics={"temperature": shared})

    batch, tx = batch_at(0), optax.sgd(0.1)
    params = net.init(jax.random.key(0), batch["x"])["params"]
    before = TrainState.create(apply_fn=None, params=params, tx=tx)
    train = pj.make_train_step(loss, tx, mesh=pj.data_mesh(2), width=1)
    state = pj.flax.linen.init(train, before, batch=batch, shared=1.0)
    for temperature in (1.0, 2.0):
        state, info = train.step(state, batch, shared=temperature)
        assert info.metrics["temperature"] == temperature
        gradients = jax.grad(loss, has_aux=True)(params, batch, shared=temperature)[0]
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
    after = pj.flax.linen.update(before, state)
    chex.assert_trees_all_close(after.params, params, rtol=1e-5)


def raw(tree):
    """Converts typed keys to integers, which NumPy can compare."""
    typed = jax.dtypes.prng_key
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, typed) else x, tree
    )


def fresh():
    variables = Model().init(jax.random.key(0), jnp.ones((1, 5)), train=False)
    return State.create(apply_fn=Model().apply, tx=TX, **variables)


@functools.cache
def make_train(width=2, **options):
    return pj.make_train_step(loss_fn, TX, mesh=pj.data_mesh(4), width=width, **options)


def run(train, state, steps=STEPS):
    losses = []
    for step in range(steps):
        state, info = train.step(state, batch_at(step))
        losses.append(float(info.loss))
    return state, losses


def test_donated_state_takes_nothing_from_the_train_state():
    train, before = make_train(donate=True, width=1), fresh()
    before = before.replace(step=jnp.int32(0))
    for _ in range(2):
        rng = jax.random.key(0)
        state = pj.flax.linen.init(train, before, rng=rng, batch=batch_at(0))
        state, _ = train.step(state, batch_at(0))
        old, before = before, pj.flax.linen.update(before, state)
        assert int(old.step) == int(before.step) - 1


def test_train_state_is_trained_and_written_back():
    train, before = make_train(), fresh()
    state = pj.flax.linen.init(train, before, rng=jax.random.key(1), batch=batch_at(0))
    state, losses = run(train, state)
    assert np.isnan(losses[0]), "nothing arrives in the first step of width 2"
    assert losses[1] > 0.8 * CHANCE
    assert np.mean(losses[-5:]) < 0.5 * CHANCE

    after = pj.flax.linen.update(before, train.drain(state)[0])
    assert int(after.step) == STEPS
    assert int(after.opt_state[0].count) == STEPS
    test = batch_at(10_000, size=512)
    logits = after.apply_fn(
        {"params": after.params, "batch_stats": after.batch_stats},
        test["x"],
        train=False,
    )
    assert float((logits.argmax(-1) == test["y"]).mean()) > 0.75

    # The adapter adds nothing to the step.
    plain = train.init(
        before.params,
        model_state={"batch_stats": before.batch_stats},
        rng=jax.random.key(1),
        batch=batch_at(0),
    )
    plain, _ = train.drain(run(train, plain)[0])
    assert_bits_equal(
        (after.params, after.opt_state, after.batch_stats),
        (plain.params, plain.opt_state, plain.model_state["batch_stats"]),
    )


def by_hand(params, model_state, batch, key):
    """Returns the loss of one device, as a Flax loop computes it."""
    logits, model_state = Model().apply(
        {"params": params, **model_state},
        batch["x"],
        train=True,
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), model_state


@grid(1, devices=[1, 4], width=[1, 2])
def test_linen_training_equals_a_loop_by_hand(devices, width):
    """Batch norm and dropout agree, with a key of its own for each device and step."""
    tx = optax.sgd(0.1, momentum=0.9)
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(devices), width=width)
    before = fresh().replace(tx=tx, opt_state=tx.init(fresh().params))
    state = pj.flax.linen.init(train, before, rng=jax.random.key(1), batch=batch_at(0))
    after = pj.flax.linen.update(before, train.drain(run(train, state, 5)[0])[0])
    params, model_state = twin.pipe_sgd(
        by_hand,
        tx,
        before.params,
        {"batch_stats": before.batch_stats},
        jax.random.key(1),
        [batch_at(step) for step in range(5)],
        devices=devices,
        width=width,
    )
    got = after.params, {"batch_stats": after.batch_stats}
    # The two programs add in different orders. A gradient has about 10 roundings of
    # terms below 1, which learning rate and momentum multiply by 0.1 / (1 - 0.9) = 1.
    chex.assert_trees_all_close(
        got, (params, model_state), rtol=0, atol=10 * np.finfo(np.float32).eps
    )


def test_train_state_continues_after_an_update():
    """It does not hold the mean gradient by which the default rule predicts."""
    train = make_train(weight_prediction="own")
    state = pj.flax.linen.init(train, fresh(), rng=jax.random.key(1), batch=batch_at(0))
    whole, _ = train.drain(run(train, train.drain(run(train, state, 3)[0])[0], 3)[0])

    drained, _ = train.drain(run(train, state, 3)[0])
    halfway = pj.flax.linen.update(fresh(), drained)
    assert int(halfway.step) == 3
    again = pj.flax.linen.init(train, halfway, rng=drained.rng, batch=batch_at(0))
    again, _ = train.drain(run(train, again, 3)[0])
    assert_bits_equal(raw(again), raw(whole))


def test_train_state_without_batch_statistics_is_trained():
    params = {"w": np.ones((5, 1), np.float32)}
    before = TrainState.create(apply_fn=None, params=params, tx=TX)
    train = pj.make_train_step(
        lambda p, batch: jnp.mean((batch["x"] @ p["w"]) ** 2),
        TX,
        mesh=pj.data_mesh(4),
        width=1,
    )
    with jax.transfer_guard("disallow"):
        state = pj.flax.linen.init(train, before)
    assert state.model_state is None
    after = pj.flax.linen.update(before, train.step(state, batch_at(0))[0])
    assert int(after.step) == 1
    assert not np.array_equal(after.params["w"], before.params["w"])


def test_frozen_dicts_stay_frozen():
    """Older code has frozen dicts, although `apply` returns ordinary ones."""
    train, before = make_train(), fresh()
    frozen = State.create(
        apply_fn=before.apply_fn,
        tx=TX,
        params=freeze(before.params),
        batch_stats=freeze(before.batch_stats),
    )
    after = []
    for each in (before, frozen):
        start = pj.flax.linen.init(
            train, each, rng=jax.random.key(1), batch=batch_at(0)
        )
        trained, _ = train.drain(run(train, start, 2)[0])
        after.append(pj.flax.linen.update(each, trained))
    assert isinstance(after[1].params, FrozenDict)
    assert isinstance(after[1].batch_stats, FrozenDict)
    assert jax.tree.structure(after[1]) == jax.tree.structure(frozen)
    assert_bits_equal(jax.tree.leaves(after[1]), jax.tree.leaves(after[0]))


class Counting(nn.Module):
    """A model with two variable collections: batch statistics and a count of calls."""

    @nn.compact
    def __call__(self, x, train):
        count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            count.value += 1
        return Model()(x, train)


def test_several_collections_and_an_extra_field_are_kept():
    class More(State):
        counters: Any
        key: jax.Array | None = None
        name: str = struct.field(pytree_node=False, default="run")

    def loss(params, batch, *, model_state, rng):
        logits, model_state = Counting().apply(
            {"params": params, **model_state},
            batch["x"],
            train=True,
            rngs={"dropout": rng},
            mutable=["batch_stats", "counters"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return loss.mean(), pj.Aux(model_state=model_state)

    variables = Counting().init(jax.random.key(0), jnp.ones((1, 5)), train=False)
    key = jax.random.key(3)
    before = More.create(apply_fn=Counting().apply, tx=TX, key=key, **variables)
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2), width=2)
    state = pj.flax.linen.init(
        train,
        before.replace(key=None),
        rng=before.key,
        collections=["batch_stats", "counters"],
    )
    after = pj.flax.linen.update(before, train.drain(run(train, state, 3)[0])[0])
    assert int(after.counters["calls"]) == 3
    assert not np.array_equal(
        after.batch_stats["Model_0"]["BatchNorm_0"]["mean"],
        before.batch_stats["Model_0"]["BatchNorm_0"]["mean"],
    )
    assert after.key is key


def test_fields_untouched_by_training_are_refused():
    class Scaled(State):
        dynamic_scale: Any = None

    class Keyed(State):
        ema: Any = None

    given = {**vars(fresh())}
    train, scale = make_train(), Scaled(**given, dynamic_scale=DynamicScale())
    start = functools.partial(pj.flax.linen.init, train, rng=jax.random.key(0))
    message = (
        r"`train_state` must not have a DynamicScale, got one in `dynamic_scale`: .*"
        r" compute_dtype=jnp.bfloat16.*replace\(dynamic_scale=None\)"
    )
    with pytest.raises(ValueError, match=message):
        start(scale)
    message = (
        r"no field that training would leave as it is, got `ema`. .*"
        r" `collections=\('batch_stats', 'ema'\)`. .*replace\(ema=None\)"
    )
    with pytest.raises(ValueError, match=message):
        start(Keyed(**given, ema=fresh().params))
    for state in (scale.replace(dynamic_scale=None), Keyed(**given)):
        assert int(start(state, batch=batch_at(0)).step) == 0


@pytest.mark.parametrize("collections", ["batch_stats", ["batch_stats", "params"]])
def test_collections_must_be_a_list_without_parameters(collections):
    message = "`collections` must be a sequence of names of variable collections, none"
    with pytest.raises(ValueError, match=message):
        pj.flax.linen.init(make_train(), fresh(), collections=collections)


def test_dynamic_scale_is_not_needed_in_bfloat16():
    """The gradient is below the range of float16, where it would need a scale."""
    tiny = 2.0**-40

    def loss(params, batch):
        return tiny * (params["w"] * batch["x"]).mean()

    params = {"w": np.ones((1, 5), np.float32)}
    tx = optax.sgd(1 / tiny)
    before = TrainState.create(apply_fn=None, params=params, tx=tx)
    train = pj.make_train_step(
        loss, tx, mesh=pj.data_mesh(2), width=1, compute_dtype=jnp.bfloat16
    )
    state, info = train.step(
        pj.flax.linen.init(train, before), {"x": np.ones((2, 5), np.float32)}
    )
    # Each weight moves by 1 / 5, up to the 8 bits of bfloat16.
    np.testing.assert_allclose(state.params["w"], 0.8, rtol=2**-8)
    assert int(info.skipped) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_train_state_replicated_for_pmap_is_refused():
    message = r"must not be replicated for jax.pmap, got a `step` of shape \(\d,\). Pa"
    for devices in (jax.devices()[:1], jax.devices()[:4]):
        with pytest.raises(ValueError, match=message):
            pj.flax.linen.init(make_train(), replicate(fresh(), devices))
    # The state follows the remedy of the message. It lies on one device, wherever the
    # mesh is.
    alone = unreplicate(replicate(fresh(), jax.devices()[4:]))
    state = pj.flax.linen.init(make_train(), alone, rng=jax.random.key(0))
    assert_bits_equal(state.params, fresh().params)


def test_update_with_gradients_in_flight_is_refused():
    train, before = make_train(), fresh()
    state = pj.flax.linen.init(train, before, rng=jax.random.key(1), batch=batch_at(0))
    assert_bits_equal(pj.flax.linen.update(before, state).params, before.params)
    state, _ = train.step(state, batch_at(0))
    message = r"got 1 computed .* `state, _ = train.drain\(state\)`"
    with pytest.raises(ValueError, match=message):
        pj.flax.linen.update(before, state)


@pytest.mark.full
@grid(1, executor=["fused", "host"], devices=[1, 4, 8], overlap=[0, 3])
def test_local_steps_train_a_train_state(executor, devices, overlap):
    """There are groups of one device, or four of two."""
    names = ("host", "device") if devices == 8 else "host"
    mesh = pj.data_mesh(devices, axis_name=names, hosts=4 if devices == 8 else None)
    train = pj.make_local_step(
        loss_fn,
        TX,
        mesh=mesh,
        axis_name="host",
        sync_every=3,
        overlap_steps=overlap,
        executor=executor,
    )
    data = [train.batch(batch_at(step), axis_name=names) for step in range(STEPS)]
    before, key = fresh().replace(step=7), jax.random.key(1)
    with jax.transfer_guard("disallow"):
        state = pj.flax.linen.init(train, before, rng=key, batch=data[0])
    assert state.local.step.tolist() == [7] * state.groups
    for batch in data:
        state, _ = train.step(state, batch)
    if overlap:
        with pytest.raises(ValueError, match=r"`state, _ = train.drain\(state\)`"):
            pj.flax.linen.update(before, state)
    state, _ = train.drain(state)
    after = pj.flax.linen.update(before, state)
    assert int(after.step) == 7 + STEPS
    assert int(after.opt_state[0].count) == STEPS
    test = batch_at(10_000, size=512)
    logits = after.apply_fn(
        {"params": after.params, "batch_stats": after.batch_stats},
        test["x"],
        train=False,
    )
    assert float((logits.argmax(-1) == test["y"]).mean()) > 0.7
    assert_bits_equal(after.params, state.params)
    assert_bits_equal(after.batch_stats, state.model_state["batch_stats"])
    for mean, groups in zip(
        jax.tree.leaves(after.opt_state[0].mu),
        jax.tree.leaves(state.local.trainable.opt_state[0].mu),
        strict=True,
    ):
        # The mean of four floats has three roundings.
        wanted = np.mean(np.asarray(groups, np.float64), 0)
        np.testing.assert_allclose(mean, wanted, rtol=1e-6, atol=1e-9)
    again = pj.flax.linen.init(train, after, rng=key, batch=data[0])
    assert again.local.step.tolist() == [7 + STEPS] * state.groups
    assert_bits_equal(jax.device_get(again.params), jax.device_get(after.params))


OVERWRITTEN = "_overwrite_with_gradient"


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.full), 2])
def test_fp8_scales_equal_the_scales_of_apply_gradients(width):
    """Compares scales in the model state with those of `TrainState.apply_gradients`."""
    net = nn.Dense(8, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) * 5
    variables, tx = net.init(jax.random.key(0), batch), optax.sgd(0.01)

    def loss(variables, batch):
        return jnp.mean((net.apply(variables, batch) - 1) ** 2)

    def loss_fn(params, batch, *, model_state):
        def of_both(params, scales):
            return loss({"params": params, OVERWRITTEN: scales}, batch)

        still = jax.lax.stop_gradient(params)
        scales = jax.grad(of_both, argnums=1)(still, model_state)
        return of_both(params, model_state), pj.Aux(model_state=scales)

    by_hand = TrainState.create(apply_fn=net.apply, params=variables, tx=tx)
    step = jax.jit(lambda s: s.apply_gradients(grads=jax.grad(loss)(s.params, batch)))
    for _ in range(4):
        by_hand = step(by_hand)

    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(1), width=width)
    state = train.init(variables["params"], model_state=variables[OVERWRITTEN])
    for _ in range(4):
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    for got, wanted in zip(
        jax.tree.leaves((state.params, state.model_state)),
        jax.tree.leaves((by_hand.params["params"], by_hand.params[OVERWRITTEN])),
        strict=True,
    ):
        # At width 2 the scales are sums of their changes, each of a rounding of 2^-24.
        np.testing.assert_allclose(got, wanted, rtol=4 * 2**-23)


def test_fp8_scales_among_the_parameters_are_refused():
    tx = optax.sgd(0.1)
    params = {"params": {"w": jnp.ones(2)}, OVERWRITTEN: {"scale": jnp.ones(1)}}
    train = pj.make_train_step(lambda p, b: 0.0, tx, mesh=pj.data_mesh(1))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    with pytest.raises(ValueError, match=f"not hold the collection `{OVERWRITTEN}"):
        pj.flax.linen.init(train, state)


def test_state_with_its_own_way_to_apply_gradients_is_refused():
    class Halved(TrainState):
        def apply_gradients(self, *, grads, **rest):
            return super().apply_gradients(grads=jax.tree.map(lambda g: g / 2, grads))

    params = {"w": jnp.ones(3)}
    state = Halved.create(apply_fn=None, params=params, tx=TX)
    train = pj.make_train_step(lambda w, x: x.mean(), TX, mesh=pj.data_mesh(2))
    with pytest.raises(
        ValueError, match=r"must have the method `apply_gradients` of T"
    ):
        pj.flax.linen.init(train, state)


def test_empty_statistics_need_no_keyword():
    """A model without batch norm has an empty collection of them."""

    def loss(params, batch):
        return jnp.mean(params["w"] * batch)

    state = State.create(
        apply_fn=None, params={"w": jnp.ones(())}, tx=TX, batch_stats={}
    )
    train = pj.make_train_step(loss, TX, mesh=pj.data_mesh(2))
    begun = pj.flax.linen.init(train, state, batch=np.ones(4, np.float32))
    begun, _ = train.drain(train.step(begun, np.ones(4, np.float32))[0])
    assert pj.flax.linen.update(state, begun).batch_stats == {}

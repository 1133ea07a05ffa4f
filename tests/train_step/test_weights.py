"""Tests losses weighted by tokens, where padding does not count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives

from ..collectives.residuals import owed
from ..grid import grid
from ..groups import batches as group_batches
from ..groups import loss_fn as group_loss
from ..groups import mesh_of, placed
from ..helpers import assert_bits_equal, init_params, x64

DEVICES, STEPS, SIZE = 4, 6, 16
KEY = jax.random.key(0)


def residuals(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None, :])
    return ((hidden @ params["out"] - batch["y"]) ** 2).mean(axis=-1)


def weighted_mean(params, batch):
    """Returns the loss of a whole batch, as lm1b computes it."""
    return (residuals(params, batch) * batch["w"]).sum() / batch["w"].sum()


def loss_fn(params, batch):
    weight = batch["w"].sum()
    loss = (residuals(params, batch) * batch["w"]).sum() / weight
    return loss, pj.Aux(metrics={"first": batch["x"][0, 0]}, weight=weight)


def padded(steps=STEPS, empty=()):
    """Returns batches with 1 to 4 real examples in 4. Shares in `empty` have none."""
    rng = np.random.default_rng(0)
    out = []
    for _ in range(steps):
        w = (np.arange(SIZE) % 4 < rng.integers(1, 5, SIZE).repeat(1)).astype("f4")
        w.reshape(-1, 4)[:, 0] = 1
        for share in empty:
            w.reshape(DEVICES, -1)[share] = 0
        out.append(
            {
                "x": rng.normal(size=(SIZE, 5)).astype("f4"),
                "y": rng.normal(size=(SIZE, 3)).astype("f4"),
                "w": w * rng.integers(1, 9, SIZE).astype("f4"),
            }
        )
    return out


@functools.cache
def compiled(tx):
    def update(g, opt_state, w):
        u, opt_state = tx.update(g, opt_state, w)
        return optax.apply_updates(w, u), opt_state

    return jax.jit(jax.value_and_grad(weighted_mean)), jax.jit(update)


def by_hand(tx, data, width):
    """Runs the recursion with the gradient of the loss over the global batch."""
    grad, update = compiled(tx)
    w, opt_state, in_flight, losses = init_params(), None, [], []
    opt_state = tx.init(w)
    for batch in data:
        loss, g = grad(w, batch)
        losses.append(float(loss))
        in_flight.append(g)
        if len(in_flight) == width:
            w, opt_state = update(in_flight.pop(0), opt_state, w)
    for g in in_flight:
        w, opt_state = update(g, opt_state, w)
    return w, losses


def trained(data, tx=None, loss=loss_fn, devices=DEVICES, **settings):
    settings = {"weight_prediction": False} | settings
    train = pj.make_train_step(
        loss, tx or optax.adamw(1e-2), mesh=pj.data_mesh(devices), **settings
    )
    state, infos = train.init(init_params(), batch=data[0]), []
    for batch in data:
        state, info = train.step(state, batch)
        infos.append(info)
    state, late = train.drain(state)
    return state, [*infos, *late]


def close(got, wanted, steps=STEPS):
    # Adam divides by the root of its second moment, and enlarges roundings where that
    # is near 0.
    bound = 64 * steps * np.finfo(np.float32).eps
    for name, x in wanted.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=bound)


@grid(
    1,
    width=[1, 2, 3],
    microbatches=[1, 2],
    executor=["fused", "host"],
    empty=[(), (1,)],
)
def test_weighted_loss_equals_the_global_batch(width, microbatches, executor, empty):
    data = padded(empty=empty)
    tx = optax.adamw(1e-2)
    state, infos = trained(
        data, tx, width=width, microbatches=microbatches, executor=executor
    )
    wanted, losses = by_hand(tx, data, width)
    close(state.params, wanted)
    arrived = [info for info in infos if info.arrived]
    np.testing.assert_allclose([x.loss for x in arrived], losses, rtol=1e-5)
    weights = [batch["w"].sum() for batch in data]
    assert [float(info.weight) for info in arrived] == weights
    assert int(state.skipped) == 0


def test_unweighted_mean_differs_from_the_global_batch():
    """Without the weight, the result differs."""
    data = padded()
    state, _ = trained(data, loss=weighted_mean, width=1)
    wanted, _ = by_hand(optax.adamw(1e-2), data, 1)
    assert np.abs(np.asarray(state.params["out"]) - wanted["out"]).max() > 1e-3


@pytest.mark.parametrize("width", [1, 2])
def test_weight_of_zero_ignores_even_nan(width):
    data = padded(empty=(2,))
    clean, _ = trained(data, width=width)
    for batch in data:
        batch["x"].reshape(DEVICES, -1, 5)[2] = np.nan
    state, infos = trained(data, width=width)
    assert_bits_equal(state.params, clean.params)
    assert int(state.skipped) == 0
    assert all(np.isfinite(info.loss) for info in infos if info.arrived)


@pytest.mark.parametrize("width", [1, 2])
def test_update_without_any_weight_is_held_and_not_counted(width):
    data = padded()
    data[2]["w"][:] = 0
    state, infos = trained(data, width=width)
    rest, _ = trained([*data[:2], *data[3:]], width=width)
    if width == 1:
        assert_bits_equal(state.params, rest.params)
    assert int(state.skipped) == 0
    gone = infos[2 + width - 1]
    assert not gone.arrived
    assert not gone.applied
    assert float(gone.weight) == 0
    assert np.isnan(gone.loss)


def test_negative_weight_is_skipped_and_counted():
    data = padded()
    data[1]["w"][:4] = -1
    state, _ = trained(data, width=1)
    assert int(state.skipped) == 1


@pytest.mark.parametrize("width", [2, 3])
def test_prediction_with_weights_on_one_device_is_synchronous(width):
    data = padded()
    state, _ = trained(data, devices=1, width=width, weight_prediction=True)
    wanted, _ = by_hand(optax.adamw(1e-2), data, 1)
    close(state.params, wanted)


def test_metrics_are_weighted_too():
    data = padded(1)
    _, (info,) = trained(data, width=1)
    weights = data[0]["w"].reshape(DEVICES, -1).sum(axis=1)
    firsts = data[0]["x"].reshape(DEVICES, -1, 5)[:, 0, 0]
    wanted = np.average(firsts, weights=weights)
    np.testing.assert_allclose(info.metrics["first"], wanted, rtol=1e-5)


def test_model_state_is_not_weighted():
    def loss(params, batch, *, model_state):
        value, aux = loss_fn(params, batch)
        return value, aux._replace(model_state=model_state + batch["x"].mean())

    (batch,) = padded(1)
    train = pj.make_train_step(
        loss, optax.sgd(0.1), mesh=pj.data_mesh(DEVICES), width=1
    )
    state = train.init(init_params(), model_state=np.float32(0), batch=batch)
    state, _ = train.step(state, batch)
    np.testing.assert_allclose(state.model_state, batch["x"].mean(), rtol=1e-5)


@grid(
    1,
    width=[2, 1],
    executor=["fused", "host"],
    codec=[codecs.top_k(2), codecs.sign(8)],
)
def test_applied_and_owed_gradients_are_all_weighted_gradients(width, executor, codec):
    """The loss is linear, so that gradients do not depend on the parameters."""
    rng, n = np.random.default_rng(0), 64
    slopes = rng.normal(size=(STEPS, DEVICES, n)).astype("f4")
    weights = rng.integers(1, 10, size=(STEPS, DEVICES)).astype("f4")
    weights[2, 1] = 0

    def linear(params, batch):
        return params @ batch["slope"][0], pj.Aux(weight=batch["weight"][0])

    data = [
        {"slope": slope, "weight": weight}
        for slope, weight in zip(slopes, weights, strict=True)
    ]
    train = pj.make_train_step(
        linear,
        optax.sgd(1.0),
        mesh=pj.data_mesh(DEVICES),
        width=width,
        executor=executor,
        weight_prediction=False,
        all_reduce=collectives.two_shot(codecs.error_feedback(codec)),
    )
    state = train.init(jnp.zeros(n), batch=data[0])
    for batch in data:
        state, _ = train.step(state, batch)
    state, _ = train.drain(state)
    left = owed(state.in_flight.codec_states, n, DEVICES, DEVICES) / DEVICES
    shares = weights / weights.sum(axis=1, keepdims=True)
    every = np.einsum("td,tdn->n", shares, slopes)
    assert np.abs(left).max() > 0.1
    np.testing.assert_allclose(left - state.params, every, rtol=0, atol=1e-5)


@grid(
    1,
    codec=[codecs.int8(8), codecs.top_k(1), codecs.rotated(codecs.int4(8), KEY, 8)],
    options=[{}, {"executor": "host"}, {"shard_optimizer": True}, {"width": 1}],
)
def test_residual_does_not_depend_on_weights_of_other_steps(codec, options):
    """All weights of a step times 1,024 change no mean, and so no bit of a run.

    What a step with many tokens owes must not count more beside few.
    """
    data, feedback = padded(), codecs.error_feedback(codec)
    options = {"width": 2, "all_reduce": collectives.two_shot(feedback), **options}
    larger = [
        {**batch, "w": batch["w"] * (1024 if number % 2 else 1)}
        for number, batch in enumerate(data)
    ]
    state, _ = trained(data, **options)
    other, _ = trained(larger, **options)
    assert_bits_equal(other.params, state.params)


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True])
def test_residual_of_sharded_models_does_not_depend_on_other_weights(sharded):
    mesh, feedback = mesh_of(4, "fsdp"), codecs.error_feedback(codecs.top_k(1))

    def loss(params, batch):
        return group_loss(params, batch), pj.Aux(weight=batch["w"].sum())

    def end(larger):
        train = pj.make_train_step(
            loss,
            optax.adamw(1e-2),
            mesh=mesh,
            axis_name="host",
            all_reduce=collectives.two_shot(feedback),
            shard_optimizer=sharded,
        )
        data = [
            {**batch, "w": np.arange(1.0, 17.0, dtype="f4") * larger ** (number % 2)}
            for number, batch in enumerate(group_batches(4))
        ]
        state = train.init(placed(mesh, "fsdp"), batch=data[0])
        for batch in data:
            state, _ = train.step(state, batch)
        return jax.device_get(train.whole_params(state))

    assert_bits_equal(end(1024), end(1))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_weighted_steps_keep_float64_and_bfloat16(dtype, coded):
    all_reduce = collectives.psum()
    if coded:
        all_reduce = collectives.two_shot(codecs.error_feedback(codecs.int8()))

    def loss(params, batch):
        return (params * batch).mean(), pj.Aux(weight=jnp.float32(2))

    with x64():
        train = pj.make_train_step(
            loss, optax.sgd(1.0), mesh=pj.data_mesh(2), all_reduce=all_reduce
        )
        params, batch = np.ones((), dtype), np.ones(8, dtype)
        state = train.init(params, batch=batch)
        for _ in range(2):
            state, _ = train.step(state, batch)
        state, (info,) = train.drain(state)
        assert state.params.dtype == dtype
        assert (float(state.params), float(info.loss)) == (-1, 0)


def errors(params, batch, mean):
    """Returns the loss with a normalized hidden layer, and 0 without any weight."""
    hidden = batch["x"] @ params["hidden"] + params["bias"][None, :]
    centred = hidden - mean(hidden)[None, :]
    hidden = jnp.tanh(centred / jnp.sqrt(mean(centred**2) + 1)[None, :])
    each = ((hidden @ params["out"] - batch["y"]) ** 2).mean(axis=-1)
    return (each * batch["w"]).sum() / jnp.maximum(batch["w"].sum(), 1)


def batch_norm(params, batch):
    def over_all(x):
        return jax.lax.pmean(x.mean(axis=0), "data")

    return errors(params, batch, over_all), pj.Aux(weight=batch["w"].sum())


@grid(1, empty=[(), (1,)], width=[1, 2])
def test_weighted_loss_with_a_collective_equals_the_global_batch(width, empty):
    """The statistics include all examples, also those of a share without weight."""
    data, tx = padded(empty=empty), optax.sgd(0.5)
    state, infos = trained(data, tx, loss=batch_norm, width=width)
    grad = jax.jit(jax.value_and_grad(lambda w, b: errors(w, b, lambda x: x.mean(0))))
    w, in_flight, losses = init_params(), [], []
    for batch in data:
        loss, g = grad(w, batch)
        losses.append(loss)
        in_flight.append(g)
        if len(in_flight) == width:
            w = jax.tree.map(lambda w, g: w - 0.5 * g, w, in_flight.pop(0))
    for g in in_flight:
        w = jax.tree.map(lambda w, g: w - 0.5 * g, w, g)
    close(state.params, w)
    found = [info.loss for info in infos if info.arrived]
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_device_without_weight_halves_the_change_of_model_state():
    """It changes none, and still counts as one of the two devices of the mean."""

    def loss(w, batch, *, model_state):
        del model_state
        weight = batch.sum()
        return (w * batch).sum() / jnp.maximum(weight, 1), pj.Aux(
            weight=weight, model_state={"last": jnp.float32(8)}
        )

    train = pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(2), width=1)
    batch = np.float32([1, 1, 0, 0])
    first = {"last": jnp.float32(0)}
    state = train.init(jnp.float32(1), model_state=first, batch=batch)
    for wanted in (4, 6, 7):
        state, _ = train.step(state, batch)
        assert state.model_state["last"] == wanted


@pytest.mark.one_python
@pytest.mark.parametrize("width", [2, 3])
def test_prediction_with_a_collective_works_for_zero_weight(width):
    """The optimizer must run on every device, or the others would wait for it."""

    def update(gradients, state, params=None):
        count = jax.lax.psum(jnp.ones(()), "data")
        return jax.tree.map(lambda g: -0.1 * g * count / DEVICES, gradients), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    data, settings = padded(empty=(1,)), {"width": width, "weight_prediction": True}
    state, _ = trained(data, tx, **settings)
    wanted, _ = trained(data, optax.sgd(0.1), **settings)
    close(state.params, wanted.params)


@grid(1, empty=[(), (1,)], devices=[1, 4])
def test_sums_divided_by_the_weight_are_sums_of_the_whole_batch(devices, empty):
    def loss_of_sums(params, batch):
        loss, aux = loss_fn(params, batch)
        sums = {"total": (batch["w"] * batch["x"][:, 0]).sum(), "count": aux.weight}
        metrics = jax.tree.map(lambda x: x / aux.weight, sums)
        return loss, aux._replace(metrics=metrics)

    (batch,) = padded(1, empty)
    train = pj.make_train_step(
        loss_of_sums, optax.sgd(0.1), mesh=pj.data_mesh(devices), width=1
    )
    _, info = train.step(train.init(init_params(), batch=batch), batch)
    sums = jax.tree.map(lambda x: x * info.weight, info.metrics)
    total = (batch["w"] * batch["x"][:, 0]).sum()
    np.testing.assert_allclose(sums["total"], total, rtol=1e-5)
    np.testing.assert_allclose(sums["count"], batch["w"].sum(), rtol=1e-6)

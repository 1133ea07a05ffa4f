"""Model state, keys, metrics, microbatches, precision, and Optax in its variety."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pipejax as pj

from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from ..reference import mean, pipe_sgd, split

DEVICES = 4


def make(loss, tx=None, **settings):
    return pj.make_train_step(
        loss, tx or optax.sgd(0.1), mesh=pj.data_mesh(DEVICES), **settings
    )


def run(train, state, data):
    states, infos = [], []
    for batch in data:
        state, info = train.step(state, batch)
        states.append(state)
        infos.append(info)
    return states, infos


# Model state


def averaging(params, batch, *, model_state):
    """Moves halfway from the model state to the mean of its share."""
    after = 0.5 * model_state + 0.5 * batch.mean()
    return params * jnp.float32(0.0), pj.Aux(model_state=after)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_model_state_obeys_the_recursion(width):
    """`s[t] = s[t-1] + mean d[t-K]`: small integers over powers of two, so exact."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 16, size=(6, 4 * DEVICES)).astype(np.float32)
    train = make(averaging, width=width, weight_prediction=False)
    state = train.init(np.float32(1), model_state=np.float32(8))
    states, _ = run(train, state, data)
    got = [s.model_state for s in [*states, train.drain(states[-1])[0]]]

    s, in_flight, expected = np.float32(8), [], []
    for batch in data:
        in_flight.append(mean([0.5 * s + 0.5 * x.mean() - s for x in split(batch, 4)]))
        if len(in_flight) == width:
            s = s + in_flight.pop(0)
        expected.append(s)
    expected.append(s + sum(in_flight))
    np.testing.assert_array_equal(np.stack(got), np.stack(expected))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_may_change_the_model_state_that_it_is_passed(microbatches):
    """Puts new leaves into the dict itself, and returns that."""

    def loss(params, batch, *, model_state):
        model_state["mean"] = model_state["mean"] + batch.mean()
        return params * batch.mean(), pj.Aux(model_state=model_state)

    train = make(loss, width=2, microbatches=microbatches)
    states, _ = run(
        train,
        train.init(np.float32(0), model_state={"mean": np.float32(0)}),
        np.ones((3, 2 * DEVICES), np.float32),
    )
    drained, _ = train.drain(states[-1])
    assert float(drained.model_state["mean"]) == 3 * microbatches


def counting(params, batch, *, model_state):
    after = {
        "count": model_state["count"] + 1,
        "key": jax.random.split(model_state["key"])[0],
        "mean": model_state["mean"] + batch.mean(),
    }
    return params * batch.mean(), pj.Aux(model_state=after)


@pytest.mark.parametrize("width", [1, 3])
def test_counters_and_keys_advance_at_once(width):
    """While the floating leaf beside them waits, and also past a skipped update."""
    key = jax.random.key(7)
    train = make(counting, width=width)
    state = train.init(
        np.float32(0),
        model_state={"count": np.int32(0), "key": key, "mean": np.float32(0)},
    )
    data = np.ones((5, DEVICES), np.float32)
    data[1, 2] = np.nan
    states, infos = run(train, state, data)
    for t, state in enumerate(states):
        key = jax.random.split(key)[0]
        assert int(state.model_state["count"]) == t + 1
        assert state.model_state["key"].dtype == key.dtype
        assert_bits_equal(*map(jax.random.key_data, (state.model_state["key"], key)))
        arrived = t + 2 - width
        skipped = arrived >= 2
        assert float(state.model_state["mean"]) == max(0, arrived - skipped)
        assert int(infos[t].skipped) == skipped
    drained, _ = train.drain(states[-1])
    assert float(drained.model_state["mean"]) == 4
    assert int(drained.model_state["count"]) == 5
    assert len(set(pj.replica_digest(drained).values())) == 1


def test_model_state_keeps_its_dtype():
    def loss(params, batch, *, model_state):
        return params * batch.mean(), pj.Aux(model_state=model_state + 1.0)

    train = make(loss, width=1)
    state = train.init(np.float32(0), model_state=jnp.bfloat16(0))
    state, _ = train.step(state, np.ones(DEVICES, np.float32))
    assert state.model_state.dtype == jnp.bfloat16
    assert float(state.model_state) == 1


# Keys


def drawing(params, batch, *, rng):
    """Metrics: what each device drew, by device."""
    here = jnp.arange(DEVICES) == lax.axis_index("data")
    drawn = jax.random.uniform(rng)
    return params * batch.mean(), pj.Aux(
        metrics=list(jnp.where(here, drawn, 0) * DEVICES)
    )


def draws(width, seed, steps=6):
    """What the devices drew, [steps, devices], rows that have not arrived left out."""
    train, batch = make(drawing, width=width), np.ones(DEVICES, np.float32)
    state = train.init(np.float32(0), rng=jax.random.key(seed), batch=batch)
    states, infos = run(train, state, [batch] * steps)
    assert len(set(pj.replica_digest(states[-1]).values())) == 1
    return np.stack([info.metrics for info in infos])[width - 1 :]


def test_a_key_for_every_device_and_step():
    drawn = draws(1, seed=0)
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(drawn, draws(1, seed=0))
    assert not np.isin(drawn, draws(1, seed=1)).any()
    # The same keys whatever the width, only later to be heard of.
    np.testing.assert_array_equal(draws(3, seed=0), drawn[:-2])


def test_a_key_for_every_microbatch():
    def loss(params, batch, *, rng):
        here = jnp.arange(DEVICES) == lax.axis_index("data")
        drawn = jax.random.uniform(rng)
        metrics = [jnp.where(here, x, 0) * DEVICES for x in (drawn, drawn**2)]
        return params * batch.mean(), pj.Aux(metrics=[list(x) for x in metrics])

    train, batch = make(loss, width=1, microbatches=4), np.ones(16, np.float32)
    # A raw key, as in older code.
    state = train.init(np.float32(0), rng=jax.random.PRNGKey(0), batch=batch)
    _, info = train.step(state, batch)
    first, second = np.asarray(info.metrics)
    # The variance of each device's draws: 0 to rounding if its key were the same four
    # times, 1/12 in expectation as it should be.
    assert (second - first**2 > 1e-3).all()


# Metrics


def reporting(params, batch):
    loss = loss_fn(params, batch)
    positive = batch["y"] > 0
    metrics = {"any": positive[0, 0], "rate": list(positive.mean(0)), "loss": loss}
    return loss, pj.Aux(metrics=metrics)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("width", [1, 3])
def test_metrics_are_means_and_lag(width, microbatches):
    data = batches(6)
    train = make(
        reporting, width=width, microbatches=microbatches, weight_prediction=False
    )
    state = train.init(init_params(), batch=data[0])
    states, infos = run(train, state, data)
    late = width - 1
    for info in infos[:late]:
        assert all(np.isnan(x).all() for x in jax.tree.leaves(info.metrics))
    for info, batch in zip(infos[late:], data, strict=False):
        positive = batch["y"] > 0
        firsts = positive[:: 16 // (DEVICES * microbatches), 0]
        # Counts over powers of two: exact.
        assert float(info.metrics["any"]) == firsts.mean()
        np.testing.assert_array_equal(info.metrics["rate"], positive.mean(0))
        assert_bits_equal(info.metrics["loss"], info.loss)
        assert info.metrics["rate"][0].dtype == np.float32
    before = [init_params(), *(s.params for s in states)]
    for t, batch in enumerate(data[: len(data) - late]):
        wanted = loss_fn(before[t], batch)
        # A mean of 48 squares, summed pairwise: 6 roundings, and 6 for a residual and
        # its square, of half an ulp each, on either side.
        rtol = 12 * np.finfo(np.float32).eps
        np.testing.assert_allclose(infos[t + late].loss, wanted, rtol=rtol)


# Microbatches


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_sum_in_order(microbatches):
    """Bit for bit the mean of single-device gradients, microbatch by microbatch."""
    size = 32  # 2 examples or more at a time: of 1, XLA contracts product and sum
    (batch,), params = batches(1, size), init_params()
    grad = jax.jit(jax.grad(loss_fn))

    def of_one_device(share):
        parts = split(share, microbatches)
        return mean([jax.tree.map(np.asarray, grad(params, part)) for part in parts])

    expected = mean([of_one_device(share) for share in split(batch, DEVICES)])
    train = make(loss_fn, reveal_gradient(), width=1, microbatches=microbatches)
    state, _ = train.step(train.init(params), batch)
    assert_bits_equal(state.opt_state, expected)

    # The gradient of the whole batch differs by the order of summation alone: on either
    # side at most `size` roundings of half an ulp of the sum of magnitudes, and 16 in
    # each example's own term (5 + 7 + 3 products in its chain, and tanh).
    whole = make(loss_fn, reveal_gradient(), width=1)
    full, _ = whole.step(whole.init(params), batch)
    terms = [grad(params, one) for one in split(batch, size)]
    magnitudes = mean([jax.tree.map(np.abs, term) for term in terms])
    for name, magnitude in magnitudes.items():
        error = np.abs(state.opt_state[name] - full.opt_state[name])
        assert (error <= (size + 16) * np.finfo(np.float32).eps * magnitude).all()


def reveal_gradient():
    """Keeps the gradient it is given as its state, and moves nothing."""

    def update(updates, state, params=None):
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


def test_model_state_passes_through_the_microbatches_in_turn():
    def loss(params, batch, *, model_state):
        return params * batch.mean(), pj.Aux(model_state=2 * model_state + batch.sum())

    train = make(loss, width=1, microbatches=2)
    state = train.init(np.float32(0), model_state=np.float32(1))
    batch = np.arange(8, dtype=np.float32)
    state, _ = train.step(state, batch)
    after = [2 * (2 * 1 + first) + second for first, second in batch.reshape(4, 2)]
    assert float(state.model_state) == np.mean(after)


# Precision


def test_bfloat16_compute_with_float32_masters():
    (batch,) = batches(1)
    train = make(loss_fn, reveal_gradient(), width=2, compute_dtype=jnp.bfloat16)
    state = train.init(init_params())
    text = train.lower(state, batch).as_text()
    dots = re.findall(r"stablehlo\.dot_general .*: \((.*?)\) -> tensor<(.*?)>", text)
    assert len(dots) == 5, "two forward, three backward: nothing asks for dx"
    for operands, result in dots:
        assert re.findall(r"(bf16|f32)>", operands) == ["bf16", "bf16"]
        assert result.endswith("xbf16")
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    pending = jax.tree.leaves(state.in_flight.pending)
    assert {x.dtype.name for x in pending} == {"float32"}
    state, _ = train.drain(train.step(state, batch)[0])
    assert_bits_equal(state.params, init_params())

    @jax.jit
    def by_hand(params, batch):
        def loss(params):
            low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
            return loss_fn(*low)

        return jax.grad(loss)(params)

    shares = split(batch, DEVICES)
    expected = mean(
        [jax.tree.map(np.asarray, by_hand(init_params(), b)) for b in shares]
    )
    assert_bits_equal(state.opt_state, expected)
    # And it is not what float32 gives.
    exact = make(loss_fn, reveal_gradient(), width=1)
    full, _ = exact.step(exact.init(init_params()), batch)
    assert not np.array_equal(full.opt_state["out"], expected["out"])


def test_integers_of_a_batch_are_not_cast():
    def loss(params, batch):
        assert batch["label"].dtype == jnp.int32
        assert batch["x"].dtype == jnp.bfloat16
        assert params.dtype == jnp.bfloat16
        return params * batch["x"].mean()

    train = make(loss, width=1, compute_dtype=jnp.bfloat16)
    batch = {"x": np.ones(DEVICES, np.float32), "label": np.arange(4, dtype=np.int32)}
    state, info = train.step(train.init(np.float32(1)), batch)
    assert state.params.dtype == np.float32
    assert info.loss.dtype == np.float32


# Optax


def test_opt_state_goes_on():
    data, tx = batches(6), optax.adamw(1e-2)
    train = make(loss_fn, tx, width=1)
    states, _ = run(train, train.init(init_params()), data)
    halfway = states[2]
    again = train.init(halfway.params, opt_state=halfway.opt_state)
    rest, _ = run(train, again, data[3:])
    assert int(rest[-1].opt_state[0].count) == 6
    assert_bits_equal(
        (rest[-1].params, rest[-1].opt_state), (states[-1].params, states[-1].opt_state)
    )


@pytest.mark.parametrize("width", [1, 3])
def test_value_is_the_loss_of_the_gradients_applied(width):
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(jnp.zeros_like, updates), value

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)
    train = make(loss_fn, tx, width=width)
    states, infos = run(train, train.init(init_params()), batches(5))
    for state, info in list(zip(states, infos, strict=True))[width - 1 :]:
        assert_bits_equal(state.opt_state, info.loss)


def test_reduce_on_plateau():
    """A loss that stays: the scale halves each time two more values have come."""
    tx = optax.chain(
        optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    )
    train = make(loss_fn, tx, width=2)
    states, _ = run(train, train.init(init_params()), batches(1) * 8)
    scales = [float(s.opt_state[1].scale) for s in states]
    # Nothing in step 0; the first value in step 1 is the best; then pairs.
    assert scales == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]


def labels(params):
    return {name: "bias" if name == "bias" else "matrix" for name in params}


MORE_OPTIMIZERS = {
    "multi-steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "muon": optax.contrib.muon(1e-2),
    "masked": optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1),
            lambda params: {name: name != "bias" for name in params},
        ),
        optax.sgd(0.1),
    ),
    "multi-transform": optax.multi_transform(
        {"matrix": optax.sgd(0.05, momentum=0.9), "bias": optax.adam(1e-2)}, labels
    ),
}


@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_optimizers_of_other_kinds(name):
    """On one device, where nothing is summed, bit for bit the reference."""
    tx, data, width = MORE_OPTIMIZERS[name], batches(7), 2
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(1), width=width)
    states, _ = run(train, train.init(init_params()), data)
    got = [s.params for s in [*states, train.drain(states[-1])[0]]]
    reference = functools.partial(pipe_sgd, loss_fn, tx, init_params(), data)
    expected = reference(workers=1, width=width, drain=True, predict=True)
    if name != "muon":
        assert_bits_equal(got, expected)
        return
    # Matrix products are summed in the order of the program they are part of, and the
    # prediction is part of another one: an ulp in each update.
    chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-6)


def test_multi_steps_as_it_is():
    """The object itself, not its `gradient_transformation()`."""
    data = batches(4)
    train = make(loss_fn, optax.MultiSteps(optax.sgd(0.1), 2), width=1)
    states, infos = run(train, train.init(init_params()), data)
    assert_bits_equal(states[0].params, init_params())
    assert_bits_equal(states[2].params, states[1].params)
    assert int(states[-1].opt_state.gradient_step) == 2
    assert all(bool(info.applied) for info in infos), "it was given every gradient"


def test_a_mesh_with_another_axis():
    """Replicas along the other axis do the same, and the mean does not count them."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, width=2)
    states, _ = run(train, train.init(init_params()), batches(3))
    plain = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), width=2)
    expected, _ = run(plain, plain.init(init_params()), batches(3))
    assert_bits_equal(states[-1].params, expected[-1].params)
    assert len(set(pj.replica_digest(states[-1]).values())) == 1


def test_microbatches_of_arrays_without_elements():
    """Features that are left out, as arrays of shape (examples, 0)."""

    def loss(params, batch):
        return jnp.mean(params * batch["x"]) + batch["none"].sum()

    train = pj.make_train_step(
        loss, optax.sgd(1.0), mesh=pj.data_mesh(2), width=1, microbatches=2
    )
    batch = {"x": np.ones(8, np.float32), "none": np.ones((8, 0), np.float32)}
    state, _ = train.step(train.init(np.float32(1)), batch)
    assert float(state.params) == 0

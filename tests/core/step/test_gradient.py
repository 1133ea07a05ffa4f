"""Tests a device's own gradient: microbatches, precision, and its message."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import pipejax as pj
from pipejax._core.step import Inputs, Settings
from pipejax._core.step._gradient import empty_message, local_message

from ...helpers import assert_bits_equal, batches, init_params, loss_fn
from ...reference import mean, split

DEVICES = 4


def make(loss, tx=None, **settings):
    return pj.make_train_step(
        loss, tx or optax.sgd(0.1), mesh=pj.data_mesh(DEVICES), **settings
    )


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_sum_in_order(microbatches):
    """The bits are those of the mean of single-device gradients of each microbatch."""
    # At least 2 examples are taken at a time: XLA contracts product and sum of one.
    size = 32
    (batch,), params = batches(1, size), init_params()
    grad = jax.jit(jax.grad(loss_fn))

    def of_one_device(share):
        parts = split(share, microbatches)
        return mean([jax.tree.map(np.asarray, grad(params, part)) for part in parts])

    expected = mean([of_one_device(share) for share in split(batch, DEVICES)])
    train = make(loss_fn, reveal_gradient(), width=1, microbatches=microbatches)
    state, _ = train.step(train.init(params), batch)
    assert_bits_equal(state.opt_state, expected)

    # The gradient of the whole batch differs only by the order of summation. On either
    # side there are at most `size` roundings of half an ulp of the sum of magnitudes,
    # and 16 in each example's own term (5 + 7 + 3 products in its chain, and tanh).
    whole = make(loss_fn, reveal_gradient(), width=1)
    full, _ = whole.step(whole.init(params), batch)
    terms = [grad(params, one) for one in split(batch, size)]
    magnitudes = mean([jax.tree.map(np.abs, term) for term in terms])
    for name, magnitude in magnitudes.items():
        error = np.abs(state.opt_state[name] - full.opt_state[name])
        assert (error <= (size + 16) * np.finfo(np.float32).eps * magnitude).all()


def reveal_gradient():
    """Makes an optimizer that keeps the gradient as its state, and moves nothing."""

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


def test_microbatches_may_have_arrays_without_elements():
    """Features that are left out are arrays of shape (examples, 0)."""

    def loss(params, batch):
        return jnp.mean(params * batch["x"]) + batch["none"].sum()

    train = pj.make_train_step(
        loss, optax.sgd(1.0), mesh=pj.data_mesh(2), width=1, microbatches=2
    )
    batch = {"x": np.ones(8, np.float32), "none": np.ones((8, 0), np.float32)}
    state, _ = train.step(train.init(np.float32(1)), batch)
    assert float(state.params) == 0


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float16, 20_000), (jnp.bfloat16, 1)])
def test_sum_of_many_microbatches_keeps_range_and_bits(dtype, size):
    """float16 ends at 65,504, and bfloat16 has no integers between 256 and 258."""
    count = 512

    def loss(params, batch):
        return (params.astype(jnp.float32) * batch.mean()).sum()

    train = pj.make_train_step(
        loss, reveal_gradient(), mesh=pj.data_mesh(1), width=1, microbatches=count
    )
    batch = np.full(count, size, np.float32)
    state, info = train.step(train.init(jnp.ones(2, dtype)), batch)
    assert info.applied
    assert state.opt_state.dtype == dtype
    assert state.opt_state.tolist() == [size] * 2


def test_key_differs_for_every_microbatch():
    def loss(params, batch, *, rng):
        here = jnp.arange(DEVICES) == lax.axis_index("data")
        drawn = jax.random.uniform(rng)
        metrics = [jnp.where(here, x, 0) * DEVICES for x in (drawn, drawn**2)]
        return params * batch.mean(), pj.Aux(metrics=[list(x) for x in metrics])

    train, batch = make(loss, width=1, microbatches=4), np.ones(16, np.float32)
    # Older code has raw keys.
    state = train.init(np.float32(0), rng=jax.random.PRNGKey(0), batch=batch)
    _, info = train.step(state, batch)
    first, second = np.asarray(info.metrics)
    # The variance of each device's draws is 1/12 in expectation. With the same key four
    # times, it would be 0 up to rounding.
    assert (second - first**2 > 1e-3).all()


def test_bfloat16_compute_keeps_float32_parameters():
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
    # float32 gives another result.
    exact = make(loss_fn, reveal_gradient(), width=1)
    full, _ = exact.step(exact.init(init_params()), batch)
    assert not np.array_equal(full.opt_state["out"], expected["out"])


def linear(params, batch, *, model_state):
    """Returns the mean of `w . x` over examples, weighted by the sum of `n` if any."""
    loss = (batch["x"] @ params["w"]).mean()
    after = {
        "sum": model_state["sum"] + batch["x"].sum(),
        "seen": model_state["seen"] + 1,
    }
    weight = batch["n"].sum() if "n" in batch else None
    return loss, pj.Aux({"first": batch["x"][0, 0]}, after, weight)


X = np.array([[1, 0], [3, 2], [5, 4], [7, 6]], np.float32)


def linear_message(batch):
    """Returns the message of `linear` at w = (1, 2), from two microbatches."""
    return local_message(
        Settings(linear, optax.sgd(0.1), "data", microbatches=2),
        {"w": jnp.array([1.0, 2.0])},
        {"sum": jnp.float32(10), "seen": jnp.int32(5)},
        None,
        Inputs(batch),
    )


@pytest.mark.parametrize(
    ("weights", "gradient", "values"),
    [
        # The means of gradients (2, 1) and (6, 5), losses 4 and 16, and metrics 1 and
        # 5.
        (None, [4, 3], [10, 3]),
        # Three times the first of each plus once the second, and a weight of 3 + 1.
        ([1, 2, 1, 0], [12, 8], [28, 4, 8]),
    ],
)
def test_message_equals_numbers_by_hand(weights, gradient, values):
    """The numbers are small integers, so that sums in any order are exact."""
    given = {"x": X} if weights is None else {"x": X, "n": np.float32(weights)}
    message, counters = linear_message(given)
    assert_bits_equal(message.gradients, {"w": np.float32(gradient)})
    assert_bits_equal(message.passengers.values, np.float32(values))
    # The change of the model state travels as a vector, and a counter does not travel.
    assert_bits_equal(message.changes, {"sum": np.float32([28]), "seen": None})
    assert_bits_equal(counters, {"sum": None, "seen": np.int32(7)})


def test_microbatch_without_weight_changes_only_counters():
    x = X.copy()
    x[:2] = np.nan
    message, counters = linear_message({"x": x, "n": np.float32([0, 0, 1, 1])})
    assert_bits_equal(message.gradients, {"w": np.float32([12, 10])})
    assert_bits_equal(message.passengers.values, np.float32([32, 2, 10]))
    assert_bits_equal(message.changes, {"sum": np.float32([22]), "seen": None})
    assert_bits_equal(counters, {"sum": None, "seen": np.int32(7)})


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_empty_message_has_the_form_of_a_full_one(dtype):
    params = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.float32(1)}
    model_state = {"mean": jnp.float32(2), "seen": jnp.int32(3)}

    def loss(params, batch, *, model_state):
        new = model_state | {"mean": model_state["mean"] + 1}
        return params["b"] * batch.mean(), pj.Aux(model_state=new)

    settings = Settings(loss, optax.sgd(0.1), "data", reduce_dtype=dtype)
    empty = empty_message(settings, params, model_state)
    full, _ = local_message(
        settings,
        params,
        model_state,
        None,
        Inputs(np.ones(4, np.float32)),
    )
    assert_bits_equal(empty, jax.tree.map(np.zeros_like, full))
    assert full.gradients["w"].dtype == jnp.bfloat16
    assert full.gradients["b"].dtype == (dtype or jnp.float32)


@pytest.mark.parametrize("settings", [{"reduce_dtype": jnp.float16}])
def test_float16_reduction_of_weighted_losses_is_refused(settings):
    def loss(params, batch):
        return loss_fn(params, batch), pj.Aux(weight=jnp.float32(16))

    (batch,) = batches(1)
    message = "`reduce_dtype` and parameters must not be float16 where .* a weight"
    with pytest.raises(ValueError, match=message):
        make(loss, **settings).init(init_params(), batch=batch)


@pytest.mark.parametrize("model_state", [None, {"mask": jnp.float32([jnp.inf])}])
def test_loss_is_traced_with_the_rows_of_a_microbatch(model_state):
    """Also by checks, before the first step and in it."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    seen = set()

    def loss(params, batch, **state):
        seen.add(batch.shape[0])
        value = (batch @ params).mean()
        return (value, pj.Aux(**state)) if state else value

    settings = {"mesh": mesh, "axis_name": "host", "microbatches": 2}
    train = pj.make_train_step(loss, optax.sgd(0.1), **settings)
    batch, given = np.ones((12, 3), np.float32), {}
    if model_state is not None:
        given = {"model_state": model_state, "batch": batch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train.step(train.init(jnp.ones(3), **given), batch)
    assert seen == {3}

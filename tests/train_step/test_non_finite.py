"""Tests that all devices skip the update of a gradient that is not finite."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj

from ..grid import grid
from ..helpers import OPTIMIZERS, assert_bits_equal, batches, init_params, loss_fn
from ..reference import mean, split

DEVICES, STEPS = 4, 7


def poisoned(at, value=np.nan, device=1, steps=STEPS):
    """Returns batches in which one device's share has a bad number in steps `at`."""
    data = batches(steps)
    for step in at:
        data[step]["y"][device * 16 // DEVICES + 2, 1] = value
    return data


def finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


@functools.cache
def compiled(tx):
    def update(g, opt_state, w):
        u, opt_state = tx.update(g, opt_state, w)
        return optax.apply_updates(w, u), opt_state

    return jax.jit(jax.grad(loss_fn)), jax.jit(update)


def reference(tx, data, width, warmup_steps=0):
    """Returns the recursion without bad gradients, and which steps were skipped."""
    grad, update = compiled(tx)
    w, opt_state = init_params(), tx.init(init_params())
    history, skips, in_flight = [], [], []

    def apply(g):
        nonlocal w, opt_state
        if finite(g):
            w, opt_state = update(g, opt_state, w)
        return not finite(g)

    for t, batch in enumerate(data):
        shares = split(batch, DEVICES)
        grads = [jax.tree.map(np.asarray, grad(w, share)) for share in shares]
        with np.errstate(invalid="ignore"):
            in_flight.append(mean(grads))
        due = t < warmup_steps or len(in_flight) == width
        skips.append(due and apply(in_flight.pop(0)))
        history.append(w)
    drain_skips = sum(apply(g) for g in in_flight)
    return [*history, w], skips, drain_skips


@functools.cache
def make(name, width, warmup_steps=0, reduce_dtype=None):
    return pj.make_train_step(
        loss_fn,
        OPTIMIZERS[name],
        mesh=pj.data_mesh(DEVICES),
        width=width,
        warmup_steps=warmup_steps,
        reduce_dtype=reduce_dtype,
        weight_prediction=False,
    )


def check(train, name, data):
    """Runs and drains a train step, and compares all its reports with `reference`."""
    expected, skips, drain_skips = reference(
        OPTIMIZERS[name], data, train.width, sum(train.boundaries)
    )
    state, got = train.init(init_params()), []
    for batch, skip in zip(data, skips, strict=True):
        before = state
        state, info = train.step(state, batch)
        got.append(state.params)
        assert int(info.skipped) == int(state.skipped) == int(before.skipped) + skip
        if skip:
            assert not bool(info.applied)
            assert_bits_equal(state.params, before.params)
            assert_bits_equal(state.opt_state, before.opt_state)
    drained, _ = train.drain(state)
    assert int(drained.skipped) == sum(skips) + drain_skips
    got.append(drained.params)
    assert finite(got)
    assert len(set(pj.replica_digest(drained).values())) == 1
    if name == "sgd":
        assert_bits_equal(got, expected)
    else:
        # This bound is derived in test_step.py.
        largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
        bound = 4 * STEPS * np.finfo(np.float32).eps / 2 * largest
        chex.assert_trees_all_close(got, expected, rtol=0, atol=bound)
    return skips, drain_skips, drained


@grid(1, width=[1, 2, 3], name=["sgd", "clip+adamw"], value=[np.nan, np.inf, -np.inf])
def test_bad_update_is_skipped_on_arrival(width, name, value):
    bad = 3
    skips, drain_skips, drained = check(make(name, width), name, poisoned([bad], value))
    assert np.flatnonzero(skips).tolist() == [bad + width - 1]
    assert drain_skips == 0
    if name == "clip+adamw":
        assert int(drained.opt_state[1][0].count) == STEPS - 1


@pytest.mark.parametrize("width", [1, 2, 3])
def test_several_bad_updates_are_skipped(width):
    skips, drain_skips, _ = check(make("sgd", width), "sgd", poisoned([1, 2, 4]))
    assert sum(skips) + drain_skips == 3


@pytest.mark.parametrize("width", [2, 3])
def test_bad_first_step_is_skipped(width):
    skips, _, _ = check(make("sgd", width), "sgd", poisoned([0]))
    assert np.flatnonzero(skips).tolist() == [width - 1]


@grid(1, last=[1, 2], width=[2, 3])
def test_bad_gradient_in_flight_is_skipped_by_the_drain(width, last):
    """The drain skips the bad gradient and applies the others."""
    skips, drain_skips, _ = check(make("sgd", width), "sgd", poisoned([STEPS - last]))
    assert sum(skips) == (last >= width)
    assert drain_skips == (last < width)


def test_bad_gradients_of_the_warm_up_are_skipped():
    train = make("clip+adamw", 3, warmup_steps=3)
    data = poisoned([0, 2, 4])
    skips, _, drained = check(train, "clip+adamw", data)
    assert np.flatnonzero(skips).tolist() == [0, 2, 6]
    assert int(drained.opt_state[1][0].count) == STEPS - 3


def test_infinities_with_sum_nan_are_skipped():
    """One device has +inf and another one -inf."""
    data = poisoned([2], np.inf, device=0)
    data[2]["y"][14, 1] = -np.inf
    skips, _, _ = check(make("sgd", 2), "sgd", data)
    assert np.flatnonzero(skips).tolist() == [3]


def linear(w, batch):
    return w * batch.mean()


@pytest.mark.parametrize(
    ("reduce_dtype", "share", "skipped"),
    [
        # This is finite in float32, whose largest number is 3.4028e38, and in a sum
        # with zeros. bfloat16 ends at 3.3895e38 and rounds it to infinity.
        (None, [3.4e38, 0, 0, 0], 0),
        (jnp.bfloat16, [3.4e38, 0, 0, 0], 1),
        # Each number is finite in bfloat16, but their sum is not.
        (jnp.bfloat16, [3e38, 3e38, 0, 0], 1),
        (jnp.bfloat16, [3e38, 0, 0, 0], 0),
    ],
)
@pytest.mark.parametrize("width", [1, 2])
def test_overflow_of_the_reduction_is_skipped(width, reduce_dtype, share, skipped):
    train = pj.make_train_step(
        linear,
        optax.sgd(1e-37),
        mesh=pj.data_mesh(DEVICES),
        width=width,
        reduce_dtype=reduce_dtype,
    )
    state, _ = train.step(train.init(np.float32(0)), np.array(share, np.float32))
    state, _ = train.drain(state)
    assert int(state.skipped) == skipped
    assert (float(state.params) == 0) == bool(skipped)


def with_metric(w, batch):
    bad = jnp.where(batch[0] == 3, jnp.nan, 1.0)
    return w * batch.mean(), pj.Aux(metrics={"bad": bad, "fine": batch.mean()})


@pytest.mark.parametrize("width", [1, 2])
def test_metric_of_nan_skips_nothing(width):
    """A metric of NaN skips nothing, and the next metric is clean again."""
    train = pj.make_train_step(
        with_metric, optax.sgd(1.0), mesh=pj.data_mesh(DEVICES), width=width
    )
    batch, clean = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    state = train.init(np.float32(0), batch=batch)
    infos = []
    for x in (batch, clean, clean):
        state, info = train.step(state, x)
        infos.append(info)
    bad, after = infos[width - 1 : width + 1]
    assert np.isnan(bad.metrics["bad"])
    assert float(bad.metrics["fine"]) == 1.5
    assert bool(bad.applied)
    assert float(after.metrics["bad"]) == 1
    assert int(state.skipped) == 0
    assert float(state.params) == -1.5


def with_state(w, batch, *, model_state):
    return w * 2.0, pj.Aux(model_state=model_state + batch.mean())


@pytest.mark.parametrize("width", [1, 2])
def test_nan_in_model_state_is_skipped_with_its_update(width):
    train = pj.make_train_step(
        with_state, optax.sgd(1.0), mesh=pj.data_mesh(DEVICES), width=width
    )
    state = train.init(np.float32(0), model_state=np.float32(0))
    for x in (1, np.nan, 1):
        state, _ = train.step(state, np.full(4, x, np.float32))
    state, _ = train.drain(state)
    assert int(state.skipped) == 1
    assert float(state.model_state) == 2
    assert float(state.params) == -4


@grid(1, value=[np.nan, np.inf], codec=[None, pj.codecs.int8(), pj.codecs.quantize()])
def test_bad_element_among_many_is_found(codec, value):
    """One of 10,000 elements of the gradient is not finite, on one device."""
    all_reduce = pj.collectives.two_shot(codec) if codec else pj.collectives.psum()
    train = pj.make_train_step(
        lambda w, batch: jnp.mean(batch @ w),
        optax.sgd(0.1),
        mesh=pj.data_mesh(DEVICES),
        width=1,
        all_reduce=all_reduce,
    )
    batch = np.ones((DEVICES, 10_000), np.float32)
    batch[1, 7_000] = value
    state, info = train.step(train.init(jnp.ones(10_000)), batch)
    assert int(info.skipped) == 1
    assert (np.asarray(state.params) == 1).all()


def test_optimizer_gets_bad_gradients_without_skip_nonfinite():
    """Without `skip_nonfinite`, a bad gradient acts as in a loop without checks."""
    data = poisoned([2])

    def run(tx, **settings):
        train = pj.make_train_step(
            loss_fn, tx, mesh=pj.data_mesh(DEVICES), width=1, **settings
        )
        state = train.init(init_params())
        for batch in data:
            state, _ = train.step(state, batch)
        return state

    sgd = optax.sgd(0.1)
    assert not finite(run(sgd, skip_nonfinite=False).params)
    zeroed = run(optax.chain(optax.zero_nans(), sgd), skip_nonfinite=False)
    assert finite(zeroed.params)
    assert int(zeroed.skipped) == 0
    counted = run(optax.apply_if_finite(sgd, 3), skip_nonfinite=False)
    assert int(counted.opt_state.total_notfinite) == 1
    # The optimizer's own branch rounds in other places: parameters of order 1, two
    # updates.
    chex.assert_trees_all_close(counted.params, run(sgd).params, rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="`skip_nonfinite` must be True or False"):
        run(sgd, skip_nonfinite=None)


FEEDBACK = pj.collectives.two_shot(pj.codecs.error_feedback(pj.codecs.int8(8)))
NARROW = optax.chain(optax.zero_nans(), optax.adamw(1e-2))


@grid(
    1,
    width=[2, 3],
    executor=["host", "fused"],
    settings=[{}, {"all_reduce": FEEDBACK}, {"shard_optimizer": True}],
    tx=[NARROW, optax.apply_if_finite(optax.adamw(1e-2), 3)],
)
def test_bad_gradient_stays_in_no_state_without_skip_nonfinite(
    width, executor, settings, tx
):
    """Predictions, the mean and residuals begin with a gradient of one device."""
    if tx is not NARROW and "shard_optimizer" in settings:
        settings = {}  # its branch needs whole gradients
    train = pj.make_train_step(
        loss_fn,
        tx,
        mesh=pj.data_mesh(DEVICES),
        width=width,
        executor=executor,
        skip_nonfinite=False,
        **settings,
    )
    state = train.init(init_params())
    for batch in poisoned([2]):
        state, info = train.step(state, batch)
    assert np.isfinite(info.loss)
    state, infos = train.drain(state)
    assert all(np.isfinite(info.loss) for info in infos)
    numbers = [
        x
        for x in jax.tree.leaves(state)
        if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
    ]
    assert finite(numbers)
    if tx is not NARROW:
        assert int(state.opt_state.total_notfinite) == 1

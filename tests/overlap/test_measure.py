import itertools

import jax
import numpy as np
import optax
import pytest

import pipejax as pj

from ..groups import batches as group_batches
from ..groups import local_step, mesh_of, placed
from ..helpers import assert_bits_equal, batches, init_params, loss_fn

QUICK = {(1, "fused"), (2, "host")}
# The quick run measures each executor at one width.
EACH = pytest.mark.parametrize(
    ("width", "executor"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
        for case in itertools.product((1, 2, 3), ("fused", "host"))
    ],
)


def full_loss(params, batch, *, model_state, rng):
    loss = loss_fn(params, batch) + 0 * jax.random.normal(rng)
    after = {"seen": model_state["seen"] + batch["x"].mean()}
    return loss, pj.Aux(metrics={"squared": loss**2}, model_state=after)


def begun(train):
    (batch,) = batches(1)
    state = train.init(
        init_params(),
        model_state={"seen": np.float32(0)},
        rng=jax.random.PRNGKey(0),
        batch=batch,
    )
    return state, batch


@EACH
def test_measurement_has_three_times_and_leaves_the_state_alone(executor, width):
    train = pj.make_train_step(
        full_loss,
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        width=width,
        executor=executor,
        donate=True,
        warmup_steps=1,
    )
    state, batch = begun(train)
    state, _ = train.step(state, batch)
    before = jax.tree.map(np.array, state)
    measured = pj.overlap.measure(train, state, batch, rounds=3, steps=2)
    assert_bits_equal(jax.tree.map(np.asarray, state), before)
    assert [len(values) for values in measured] == [3, 3, 3]
    assert all(value > 0 for values in measured for value in values)
    text = str(measured)
    assert "3 rounds" in text
    assert "floor 1.00, nothing hidden 1." in text


@EACH
def test_step_with_a_sharded_optimizer_is_measured(executor, width):
    train = pj.make_train_step(
        loss_fn,
        optax.adamw(0.1),
        mesh=pj.data_mesh(2),
        width=width,
        executor=executor,
        shard_optimizer=True,
    )
    params = init_params() | {"split": np.ones((4, 2), np.float32)}
    state, (batch,) = train.init(params), batches(1)
    measured = pj.overlap.measure(train, state, batch, rounds=3, steps=2)
    assert all(value > 0 for values in measured for value in values)


def test_step_with_a_shared_input_is_measured_and_inspected():
    def loss(params, batch, *, shared):
        return shared * loss_fn(params, batch)

    train, (batch,) = make(loss), batches(1)
    state = train.init(init_params(), batch=batch, shared=1.0)
    measured = pj.overlap.measure(train, state, batch, 2.0, rounds=2, steps=1)
    assert len(measured.step) == 2
    report = pj.overlap.inspect(train, state, batch, shared=2.0)
    assert report == pj.overlap.inspect(train, state, batch, 2.0)
    assert report.flops == pj.overlap.inspect(make(loss_fn), state, batch).flops
    with pytest.raises(ValueError, match=r"`args` must be left out .* got 1 of them"):
        pj.overlap.inspect(train.lower(state, batch, 2.0), shared=2.0)


def make(loss):
    return pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(2))


def test_ratio_and_ceiling_follow_from_the_times():
    measured = pj.overlap.Measurement((2.0, 2.0), (1.0, 2.0), (2.5, 4.0))
    assert measured.ratio == (1.25, 2.0)
    assert measured.ceiling == (1.5, 2.0)


def test_quartiles_lie_among_the_measured_times():
    said = str(pj.overlap.Measurement((2.0, 4.0), (1.0, 3.0), (5.0, 5.0)))
    assert "3000.00  (2500.00 - 3500.00) ms" in said
    assert "2000.00  (1500.00 - 2500.00) ms" in said


@pytest.mark.parametrize(
    "wrong", [{"rounds": 1}, {"rounds": 2.5}, {"steps": 0}, {"steps": "3"}]
)
def test_too_few_rounds_or_steps_are_refused(wrong):
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(1))
    state = train.init(init_params())
    with pytest.raises(
        ValueError, match=r"`rounds` must be an integer of at least 2, .* got rounds="
    ):
        pj.overlap.measure(train, state, batches(1)[0], **wrong)


@pytest.mark.parametrize(
    ("executor", "overlap"),
    [("fused", 2), ("host", 1), pytest.param("host", 0, marks=pytest.mark.full)],
)
def test_local_step_is_measured_and_its_state_left_alone(executor, overlap):
    train = pj.make_local_step(
        full_loss,
        optax.adamw(0.1),
        mesh=pj.data_mesh(2),
        sync_every=3,
        overlap_steps=overlap,
        executor=executor,
        donate=True,
        warmup_steps=1,
    )
    state, batch = begun(train)
    for _ in range(2):
        state, _ = train.step(state, batch)
    before = jax.tree.map(np.array, state)
    measured = pj.overlap.measure(train, state, batch, rounds=2, steps=2)
    assert_bits_equal(jax.tree.map(np.asarray, state), before)
    assert [len(values) for values in measured] == [2, 2, 2]
    assert all(value > 0 for values in measured for value in values)
    train.step(state, batch)


def test_local_step_of_groups_with_timed_rounds_is_measured():
    mesh = mesh_of(2, "fsdp")
    train = local_step(mesh, sync_every="auto")
    (batch,) = group_batches(1)
    batch = train.batch(batch, axis_name=("host", "fsdp"))
    state = train.init(placed(mesh, "fsdp"), batch=batch)
    measured = pj.overlap.measure(train, state, batch, rounds=2, steps=1)
    assert all(value > 0 for values in measured for value in values)


def test_state_of_another_kind_of_step_is_not_measured():
    train = pj.make_local_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2))
    state = make(loss_fn).init(init_params())
    with pytest.raises(ValueError, match=r"`state` must be the pj.LocalState"):
        pj.overlap.measure(train, state, batches(1)[0])

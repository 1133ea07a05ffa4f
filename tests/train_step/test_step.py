"""Tests that the step computes the paper's recursion, against code without pipejax."""

import functools
import itertools

import chex
import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.message import count as count_in_flight

from ..grid import grid
from ..helpers import (
    OPTIMIZERS,
    assert_bits_equal,
    batches,
    init_params,
    loss_fn,
    trajectory,
)
from ..reference import pipe_sgd

STEPS = 9


@functools.cache
def reference(name, workers, width, warmup_steps):
    return pipe_sgd(
        loss_fn,
        OPTIMIZERS[name],
        init_params(),
        batches(STEPS),
        workers=workers,
        width=width,
        warmup_steps=warmup_steps,
        drain=True,
    )


@grid(1, width=[1, 2, 3, 4], devices=[1, 2, 4, 8], name=OPTIMIZERS, warmup_steps=[0, 3])
def test_plain_delay_equals_the_recursion_by_hand(width, devices, name, warmup_steps):
    train = pj.make_train_step(
        loss_fn,
        OPTIMIZERS[name],
        mesh=pj.data_mesh(devices),
        width=width,
        warmup_steps=warmup_steps,
        weight_prediction=False,
    )
    got = trajectory(train, init_params(), batches(STEPS))
    expected = reference(name, devices, width, warmup_steps)
    if devices == 1 or name == "sgd":
        # Both sums are in rank order, and u(g) = 0.1 g has no multiplication that could
        # be contracted with an addition.
        assert_bits_equal(got, expected)
        return
    # Otherwise the compiler may contract the mean's division with the optimizer's first
    # addition, or that with its product. This is one rounding more or less, half an
    # ulp, in each of T updates. Nothing amplifies it, because every run is inside its
    # stability limit. The factor 4 covers Adam's chain of four operations from gradient
    # to parameter.
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    bound = 4 * STEPS * np.finfo(np.float32).eps / 2 * largest
    chex.assert_trees_all_close(got, expected, rtol=0, atol=bound)


@grid(1, name=OPTIMIZERS, devices=[1, 2, 8])
def test_width_1_equals_psum_and_an_optax_step(name, devices):
    tx, mesh = OPTIMIZERS[name], pj.data_mesh(devices)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    def by_hand(params, opt_state, batch):
        grads = lax.pmean(jax.grad(loss_fn)(params, batch), "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, expected = init_params(), []
    opt_state = tx.init(params)
    for batch in batches(20):
        params, opt_state = by_hand(params, opt_state, batch)
        expected.append(params)
    train = pj.make_train_step(loss_fn, tx, mesh=mesh, width=1)
    assert_bits_equal(
        trajectory(train, init_params(), batches(20), drain=False), expected
    )


@pytest.mark.one_python
@grid(0, width=[3, 2, 4], warmup_steps=[2, 0])
def test_first_steps_change_nothing_and_report_no_loss(width, warmup_steps):
    """With AdamW, a zero gradient would change its count, moments and weights."""
    train = pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2, weight_decay=0.1),
        mesh=pj.data_mesh(4),
        width=width,
        warmup_steps=warmup_steps,
    )
    state = train.init(init_params())
    data = batches(warmup_steps + width + 1)
    for batch in data[:warmup_steps]:
        state, info = train.step(state, batch)
        assert bool(info.applied)
    for batch in data[warmup_steps : warmup_steps + width - 1]:
        before = state
        state, info = train.step(state, batch)
        assert_bits_equal(state.params, before.params)
        assert_bits_equal(state.opt_state, before.opt_state)
        assert not bool(info.applied)
        assert np.isnan(info.loss)
    for batch in data[warmup_steps + width - 1 :]:
        before = state
        state, info = train.step(state, batch)
        assert bool(info.applied)
        assert np.isfinite(info.loss)
        assert int(state.opt_state[0].count) == int(before.opt_state[0].count) + 1


@grid(1, width=[3, 2, 4, 1], steps=[5, 1, 2, 0])
def test_drain_applies_every_gradient_once(width, steps):
    train = pj.make_train_step(
        loss_fn, optax.adam(1e-2), mesh=pj.data_mesh(2), width=width
    )
    state = train.init(init_params())
    for batch in batches(steps):
        state, _ = train.step(state, batch)
    drained, _ = train.drain(state)
    assert int(drained.opt_state[0].count) == steps
    assert count_in_flight(drained.in_flight) == 0
    assert_bits_equal(train.drain(drained)[0], drained)


def test_pipeline_refills_after_a_drain():
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), width=3)
    state = train.init(init_params())
    applied = []
    for i, batch in enumerate(batches(10)):
        if i == 5:
            state, _ = train.drain(state)
        state, info = train.step(state, batch)
        applied.append(bool(info.applied))
    assert applied == [False, False, True, True, True] * 2


def test_loss_belongs_to_the_applied_gradient():
    width, data = 3, batches(8)
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4),
        width=width,
        weight_prediction=False,
    )
    state, computed, reported = train.init(init_params()), [], []
    for batch in data:
        computed.append(float(loss_fn(state.params, batch)))
        state, info = train.step(state, batch)
        reported.append(float(info.loss))
    late = width - 1
    assert all(np.isnan(reported[:late]))
    np.testing.assert_allclose(reported[late:], computed[:-late], rtol=1e-6)


@pytest.mark.one_python
def test_replicas_stay_identical():
    train = pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(8),
        width=2,
        warmup_steps=20,
        donate=True,
    )
    state = train.init(init_params())
    for batch in batches(300):
        state, _ = train.step(state, batch)
    digests = pj.replica_digest(state)
    assert len(digests) == 8
    assert len(set(digests.values())) == 1
    assert set(pj.replica_digest(train.init(init_params())).values()) != set(
        digests.values()
    )


def test_each_program_is_traced_once():
    """Warm-up, step and drain are three programs, each of which is traced once."""
    traced = []

    def counted(params, batch):
        traced.append(1)
        return loss_fn(params, batch)

    train = pj.make_train_step(
        counted, optax.adam(1e-3), mesh=pj.data_mesh(4), width=2, warmup_steps=3
    )
    state = train.init(init_params())
    for batch in batches(10):
        state, _ = train.step(state, batch)
        state = train.drain(state)[0] if int(state.step) % 4 == 0 else state
    assert len(traced) == 2, "one trace of the loss for the warm-up, one for the step"

    @chex.assert_max_traces(1)
    def step(state, batch):
        return train.step(state, batch)

    train = pj.make_train_step(loss_fn, optax.adam(1e-3), mesh=pj.data_mesh(4))
    state, jitted = train.init(init_params()), jax.jit(step)
    for batch in batches(4):
        state, _ = jitted(state, batch)


def test_scan_of_steps_equals_the_recursion():
    data = jax.tree.map(lambda *xs: np.stack(xs), *batches(6))
    train = pj.make_train_step(loss_fn, optax.adam(1e-2), mesh=pj.data_mesh(4))

    @jax.jit
    def run(state, data):
        return lax.scan(train.step, state, data)

    state, info = run(train.init(init_params()), data)
    expected = trajectory(train, init_params(), batches(6), drain=False)[-1]
    chex.assert_trees_all_close(state.params, expected, rtol=1e-6, atol=1e-7)
    assert info.applied.tolist() == [False] + [True] * 5
    assert int(state.step) == 6


FEEDBACK = pj.collectives.two_shot(pj.codecs.error_feedback(pj.codecs.int8()))


def donating(width, executor="fused", *, donate=True, **options):
    return pj.make_train_step(
        loss_fn,
        optax.adam(1e-2),
        mesh=pj.data_mesh(2),
        width=width,
        executor=executor,
        donate=donate,
        **options,
    )


@grid(1, width=[1, 2, 3], executor=["fused", "host"])
def test_donation_takes_only_arrays_leaving_the_state(width, executor):
    """The fused step donates what leaves the queue; the host executor needs it."""
    train = donating(width, executor, all_reduce=FEEDBACK)
    state = train.init(init_params())
    for batch in batches(width):
        state, _ = train.step(state, batch)
    after, _ = train.step(state, batches(1)[0])
    taken = {id(x) for x in jax.tree.leaves(state) if x.is_deleted()}
    replicated = jax.tree.leaves((state.params, state.opt_state))
    leaving = jax.tree.leaves(
        (state.in_flight.pending[:1], state.in_flight.codec_states)
    )
    staying = jax.tree.leaves(state.in_flight.pending[1:])
    assert taken >= set(map(id, replicated))
    assert (taken >= set(map(id, leaving))) == (executor == "fused")
    assert not taken & set(map(id, staying))
    kept = jax.tree.leaves(after.in_flight.pending[:-1])
    assert list(map(id, kept)) == list(map(id, staying)), "no copy of what stays"


DONATED = {
    "width 1": {"width": 1},
    "warm-up": {"width": 2, "warmup_steps": 2},
    "codec": {"width": 3, "all_reduce": FEEDBACK},
    "own": {"width": 3, "weight_prediction": "own"},
    "scheduled": {
        "width": 2,
        "all_reduce": pj.collectives.scheduled([pj.collectives.psum(), FEEDBACK], [3]),
    },
}
QUICK = {("width 1", "fused"), ("codec", "fused"), ("warm-up", "host")}


@pytest.mark.parametrize(
    ("name", "executor"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
        for case in itertools.product(DONATED, ("fused", "host"))
    ],
)
def test_donation_changes_no_bit(name, executor):
    def run(donate):
        train = donating(executor=executor, donate=donate, **DONATED[name])
        state = train.init(init_params())
        for batch in batches(6):
            state, _ = train.step(state, batch)
        return train.drain(state)[0]

    assert_bits_equal(run(donate=True), run(donate=False))

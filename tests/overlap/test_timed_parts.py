"""Tests which steps `measure` times: with a chunk beside each, and with none."""

import jax
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax.overlap._timed_parts import parts_of, parts_of_rounds

from ..helpers import assert_bits_equal, batches, init_params, loss_fn

(BATCH,) = batches(1)
STEPS = 3


def moved(train, state, steps):
    """Returns for each step whether the anchor has moved in it."""
    found = []
    for _ in range(steps):
        before, (state, _) = state, train.step(state, BATCH)
        pairs = zip(*(jax.tree.leaves(x.params) for x in (before, state)), strict=True)
        found.append(any(not np.array_equal(a, b) for a, b in pairs))
    return found


def local_step(**settings):
    mesh = pj.data_mesh(2)
    return pj.make_local_step(loss_fn, optax.sgd(0.1), mesh=mesh, **settings)


@pytest.mark.parametrize(("every", "overlap"), [(4, 4), (4, 2), (4, 1), (4, 0)])
@pytest.mark.parametrize("executor", ["fused", "host"])
def test_every_whole_step_has_a_chunk_and_no_step_alone(executor, every, overlap):
    rounds = {"sync_every": every, "overlap_steps": overlap}
    train = local_step(executor=executor, warmup_steps=1, **rounds)
    parts = parts_of_rounds(train, train.init(init_params()), STEPS)
    assert parts.whole.executor.name == parts.alone.executor.name == executor
    assert moved(parts.alone, parts.state, STEPS) == [False] * STEPS
    # Chunks that travel beside the first step have nothing to move yet.
    assert moved(parts.whole, parts.state, STEPS)[1:] == [True] * (STEPS - 1)


@pytest.mark.parametrize("overlap", [1, 2])
def test_exchange_alone_sums_a_chunk(overlap):
    """It sums the first chunk, and leaves the state as it is."""
    rounds = {"sync_every": 2, "overlap_steps": overlap}
    train = local_step(donate=True, **rounds)
    state, _ = train.step(train.init(init_params()), BATCH)
    drained, _ = local_step(**rounds).drain(state)
    outcome = parts_of_rounds(train, state, STEPS).exchange()
    assert_bits_equal(outcome.due.anchor, drained.shared.anchor[0])
    assert (outcome.arrival is not None) == (overlap == 1)


def test_step_alone_of_a_pipeline_sums_nothing():
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2), width=3)
    state = train.init(init_params())
    parts = parts_of(train, state, BATCH, None)
    assert parts.fills == 2
    assert parts.alone.transfers(state, BATCH) == ()
    assert parts.whole.transfers(state, BATCH) == train.transfers(state, BATCH)
    reduced, _ = parts.exchange()
    assert all(not leaf.any() for leaf in jax.tree.leaves(reduced.sum.gradients))


@pytest.mark.parametrize("executor", ["fused", "host"])
@pytest.mark.parametrize("divided", ["delayed", "at_once"])
def test_exchange_alone_has_delayed_and_other_gradients(executor, divided):
    """The step alone has none of it."""
    key = jax.random.key(0)
    choice = {
        "delayed": {"delayed": lambda params: {k: k == "hidden" for k in params}},
        "at_once": {"at_once": pj.codecs.power_sgd(1, key)},
    }[divided]
    mesh = pj.data_mesh(2)
    train = pj.make_train_step(
        loss_fn, optax.sgd(0.1), mesh=mesh, executor=executor, **choice
    )
    state = train.init(init_params())
    parts = parts_of(train, state, BATCH, None)
    assert parts.alone.transfers(parts.silent, BATCH) == ()
    (late, _), (early, _) = parts.exchange()
    shapes = [
        {k: x if x is None else x.shape for k, x in each.sum.gradients.items()}
        for each in (late, early)
    ]
    if divided == "delayed":
        found = [{k for k, x in each.items() if x is not None} for each in shapes]
        assert found == [{"hidden"}, {"bias", "out"}]
    else:
        assert shapes[0] == shapes[1] == {k: x.shape for k, x in init_params().items()}
    assert parts.alone.step(parts.silent, BATCH)[1].skipped == 0


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("executor", ["fused", "host"])
def test_exchange_alone_has_the_messages_of_hosts(executor, width):
    axes = "host", "device"
    train = pj.make_train_step(
        loss_fn,
        optax.adam(0.1),
        mesh=pj.data_mesh(4, axis_name=axes, hosts=2),
        axis_name=axes,
        executor=executor,
        width=width,
        delayed=None if width == 1 else {"hidden": True, "bias": False, "out": True},
    )
    parts = parts_of(train, train.init(init_params()), BATCH, None)
    exchanged = jax.tree.leaves(parts.exchange())
    assert all(np.isfinite(np.asarray(x)).all() for x in exchanged)
    state, _ = parts.whole.step(parts.state, BATCH)
    assert_bits_equal(*map(jax.device_get, (state, train.step(parts.state, BATCH)[0])))


def test_step_alone_does_not_agree_on_weights():
    """Beside a codec with a state, devices agree on the mean weight before a sum."""

    def weighted(params, batch):
        return loss_fn(params, batch), pj.Aux(weight=batch["y"].size)

    codec = pj.codecs.error_feedback(pj.codecs.int8())
    train = pj.make_train_step(
        weighted,
        optax.sgd(0.1),
        mesh=pj.data_mesh(2),
        all_reduce=pj.collectives.two_shot(codec),
    )
    state = train.init(init_params(), batch=BATCH)
    parts = parts_of(train, state, BATCH, None)
    assert parts.alone.transfers(parts.silent, BATCH) == ()

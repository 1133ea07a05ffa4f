"""Tests the rounds of local steps that times of steps and exchanges choose."""

import jax
import pytest

import pipejax as pj
from pipejax._internal.round_schedule import RoundSchedule

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from .test_local_step import made, new


@pytest.mark.full
@grid(1, executor=["fused", "host"], donate=[False, True])
def test_timed_round_is_one_of_as_many_steps(monkeypatch, executor, donate):
    def run_twice(*runs):
        jax.block_until_ready([run() for run in runs for _ in range(2)])
        return [1.0] * len(runs)

    rounds, three = "pipejax._core.executors._rounds", RoundSchedule(3, 3)
    monkeypatch.setattr(f"{rounds}.medians", run_twice)
    monkeypatch.setattr(f"{rounds}.schedule_to_hide", lambda timed: three)
    data, codec = batches(8), pj.codecs.error_feedback(pj.codecs.int8(8))
    settings = {
        "executor": executor,
        "donate": donate,
        "all_reduce": pj.collectives.two_shot(codec),
    }
    train = new(loss_fn, sync_every="auto", overlap_steps=None, **settings)
    plain = made(loss_fn, sync_every=3, overlap_steps=3, **settings)
    ends = []
    for each in (train, plain):
        state = each.init(init_params(), batch=data[0])
        assert len(state.shared.anchor) == 3
        for batch in data:
            state, info = each.step(state, batch)
        ends.append(jax.device_get((state.shared, state.own, info)))
    assert_bits_equal(*ends)


@pytest.mark.parametrize(
    ("seconds", "schedule"),
    [
        # A step, an exchange of all, and one of a chunk.
        ([2.0, 8.0, 0.125], RoundSchedule(5, 5)),
        ([2.0, 8.0, 7.0], RoundSchedule(16, 0)),
    ],
)
def test_round_follows_from_the_times_of_a_step_and_exchanges(
    monkeypatch, caplog, seconds, schedule
):
    left = list(seconds)

    def medians(*runs):
        jax.block_until_ready([run() for run in runs])
        return [left.pop(0) for _ in runs]

    monkeypatch.setattr("pipejax._core.executors._rounds.medians", medians)
    train = new(loss_fn, sync_every="auto", overlap_steps=None)
    state = train.init(init_params(), batch=batches(1)[0])
    assert not left
    assert state.shared.form.schedule == schedule
    waits = [x for x in caplog.records if "wait for an exchange" in x.message]
    assert len(waits) == (schedule.overlap_steps == 0)
    for batch in batches(schedule.sync_every):
        state, info = train.step(state, batch)
    assert bool(info.arrived)


@pytest.mark.parametrize(
    "batch", [None, jax.eval_shape(lambda: batches(1)[0])], ids=["none", "shapes"]
)
def test_timing_without_arrays_is_refused(batch):
    train = new(loss_fn, sync_every="auto", overlap_steps=None)
    with pytest.raises(ValueError, match="`batch` must be a batch of arrays"):
        train.init(init_params(), batch=batch)

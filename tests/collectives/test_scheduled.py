"""Tests which all-reduce of a schedule runs at a step, by counts and by bits."""

import time

import jax
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax import codecs, collectives
from pipejax._core.step import Inputs
from pipejax._internal.communication_thread import submit

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from ..internal.test_wire import in_text

BOUNDARY, STEPS = 3, 6
CODED = collectives.two_shot(codecs.error_feedback(codecs.int4(8)))
BOTH = collectives.scheduled([collectives.psum(), CODED], [BOUNDARY])


def make(all_reduce, width=2, executor="fused", **settings):
    return pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4),
        width=width,
        all_reduce=all_reduce,
        executor=executor,
        **settings,
    )


def test_phase_of_a_schedule_follows_the_boundaries():
    three = [collectives.psum(), collectives.ring(), collectives.tree()]
    schedule = collectives.scheduled(three, [2, 5])
    assert [schedule.phase(step) for step in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert [phase.all_reduce for phase in schedule.phases] == three


def test_each_phase_lowers_its_own_collectives():
    """Each phase has its own program, and `lower` returns that of the last phase."""
    train = make(BOTH)
    state, (batch,) = train.init(init_params()), batches(1)
    lowered = (executor.lower(state, Inputs(batch)) for executor in train._executors)
    found = [in_text(program.as_text()) for program in lowered]
    arrays = len(jax.tree.leaves(state.in_flight.pending[0]))
    # Where residuals are kept, all devices first agree whether the sum is usable.
    coded = ["all-reduce", "all-to-all", "all-gather"]
    assert found == [["all-reduce"] * arrays, coded]
    assert in_text(train.lower(state, batch).as_text()) == found[-1]


def history(train, steps=STEPS, drain_at=()):
    """Returns the parameters and the codec states after every step."""
    state, out = train.init(init_params()), []
    for t, batch in enumerate(batches(steps)):
        state, _ = train.step(state, batch)
        state = train.drain(state)[0] if t in drain_at else state
        out.append(jax.tree.map(np.asarray, (state.params, state.in_flight)))
    params, in_flight = zip(*out, strict=True)
    return params, [x.codec_states for x in in_flight]


@grid(1, width=[1, 2], executor=["fused", "host"])
def test_first_all_reduce_runs_up_to_the_boundary(width, executor):
    """The bits are those of the first all-reduce before the boundary, not after.

    From the boundary on, residuals are kept. A message in flight at the boundary is
    summed by the all-reduce of the step in which it is due.
    """
    params, kept = history(make(BOTH, width, executor))
    plain, _ = history(make(collectives.psum(), width, executor))
    assert_bits_equal(params[:BOUNDARY], plain[:BOUNDARY])
    after = zip(params[BOUNDARY:], plain[BOUNDARY:], strict=True)
    assert all(not np.array_equal(a["out"], b["out"]) for a, b in after)
    residuals = [np.abs(jax.tree.leaves(x)[0]).max() for x in kept]
    assert not any(residuals[:BOUNDARY])
    assert all(residuals[BOUNDARY:])


@grid(0, executor=["host", "fused"])
def test_drain_sums_by_the_algorithm_of_the_next_step(executor):
    """A drain sums by the algorithm of the next step."""
    params, kept = history(make(BOTH, 2, executor), drain_at=(1, 4))
    plain, _ = history(make(collectives.psum(), 2, executor), drain_at=(1, 4))
    assert_bits_equal(params[:BOUNDARY], plain[:BOUNDARY])
    assert not np.array_equal(params[4]["out"], plain[4]["out"])
    assert not np.abs(jax.tree.leaves(kept[2])[0]).max()
    assert np.abs(jax.tree.leaves(kept[4])[0]).max()


def test_warm_up_across_the_boundary_follows_both_phases():
    """A warm-up runs at width 1 up to step 4, with the algorithm of each phase."""
    params, _ = history(make(BOTH, 2, warmup_steps=4))
    plain, _ = history(make(BOTH, 1))
    assert_bits_equal(params[:4], plain[:4])
    assert_bits_equal(params[4], params[3])  # the pipeline fills, so nothing is applied
    assert not np.array_equal(params[5]["out"], plain[5]["out"])


def test_repeated_algorithm_keeps_two_states():
    twice = collectives.scheduled([CODED, CODED], [BOUNDARY])
    _, kept = history(make(twice, 1))
    first = [x["phase 0 gather"].residual for x in kept]
    second = [x["phase 1 gather"].residual for x in kept]
    assert_bits_equal(first[BOUNDARY - 1 :], [first[BOUNDARY - 1]] * (STEPS - 2))
    assert not any(np.abs(x).max() for x in second[:BOUNDARY])
    assert all(np.abs(x).max() for x in second[BOUNDARY:])


def test_schedule_inside_a_traced_program_is_refused():
    """The phase is chosen on the host, which must know the step."""
    train = make(BOTH)
    state, (batch,) = train.init(init_params()), batches(1)
    message = r"`train.step` must not be traced .* a schedule of all-reduces"
    with pytest.raises(ValueError, match=message):
        jax.jit(train.step)(state, batch)


@pytest.mark.parametrize(
    "wait", [lambda train: train.join(), lambda t: t.init(init_params())]
)
def test_join_and_init_wait_for_threads_of_all_phases(wait):
    train = make(BOTH, executor="host")
    state, _ = train.step(train.init(init_params()), batches(1)[0])
    (begun,) = train._executors[0]._begun
    late = submit(time.sleep, 0.2)
    wait(train)
    assert begun.result.done()
    assert late.done()
    assert state.calls == 1

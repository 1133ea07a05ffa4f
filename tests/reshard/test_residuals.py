"""Tests that a change of the number of devices loses no residuals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax import codecs, collectives
from pipejax.reshard import Spread, reshard, sum_owed

from ..helpers import batches
from .runs import (
    ALL_REDUCES,
    HIERARCHICAL,
    RATE,
    SIGN,
    moved,
    params,
    run,
    train_step,
    weighted,
)

FULL = pytest.mark.full


def owed(train, state):
    """Returns what devices still owe for `w`, as a contribution to the means."""
    on, form = Spread.of(state), train.gradients_form(state)
    sums = [
        sum_owed(phase, form, train, on, state.in_flight.codec_states)
        for phase in train.schedule.phases
    ]
    _, weights = zip(*sums, strict=True)  # of the parameters "half" and "w"
    return np.ravel(sum(map(np.array, weights)) / on.devices)


def sent(state):
    """Returns the sum of all means so far."""
    return -np.array(state.params["w"]).reshape(-1) / RATE


def due(data):
    """Returns the sum of all means without a codec."""
    means = [np.einsum("bi,bj->ij", x["x"], x["y"]) / len(x["x"]) for x in data]
    return sum(means).reshape(-1)


# The cases of the quick run. Most other algorithms are parts of these: ring and two-
# shot of "scheduled", tree of "tree, power_sgd", the outer exchange of "both".
QUICK = {
    "fewer": {"halving_doubling", "scheduled"},
    "more": {"tree, power_sgd", "both"},
}


def cases():
    """Yields all algorithms, each with a change to fewer and to more devices.

    Cases of one algorithm are neighbours, because they share a train step.
    """
    spreads = {"fewer": ((4, None), (3, None)), "more": ((1, None), (4, None))}
    in_two = {"fewer": ((6, 3), (2, 1)), "more": ((4, 2), (4, 4))}
    for names, found in (ALL_REDUCES, spreads), (HIERARCHICAL, in_two):
        for name, direction in itertools.product(names, found):
            marks = () if name in QUICK[direction] else FULL
            yield pytest.param(name, *found[direction], marks=marks)


@pytest.mark.parametrize(("name", "before", "now"), list(cases()))
def test_what_was_due_is_sent_or_owed(name, before, now):
    all_reduce = (ALL_REDUCES | HIERARCHICAL)[name]
    data = batches(8, size=24)
    first, second = train_step(all_reduce, *before), train_step(all_reduce, *now)
    state = run(first, first.init(params()), data[:4])
    kept = owed(first, state)
    # About 10 sums of numbers below 10 are rounded once each.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    close(sent(state) + kept, due(data[:4]))
    assert np.abs(kept).max() > 1e-2, "nothing to hand on"
    state = moved(second, state)
    close(owed(second, state), kept)
    state = run(second, state, data[4:])
    close(sent(state) + owed(second, state), due(data))


def test_a_codec_without_feedback_beside_loses_nothing_of_it():
    all_reduce = collectives.hierarchical(
        collectives.two_shot(codecs.int4(8)), collectives.two_shot(SIGN)
    )
    first, second = train_step(all_reduce, 4, 2), train_step(all_reduce, 2, 2)
    state = run(first, first.init(params()), batches(4, size=24))
    kept = owed(first, state)
    assert np.abs(kept).max() > 1e-2, "nothing to hand on"
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    close(owed(second, moved(second, state)), kept)


@pytest.mark.parametrize("now", [1, 6])
def test_the_weighted_sum_of_what_is_owed_stays_the_same(now):
    batch = {"x": batches(1, size=12)[0]["x"], "n": np.arange(1.0, 13, dtype="f4")}
    first, second = weighted(4, SIGN), weighted(now, SIGN)
    state = run(first, first.init(jnp.zeros(5), batch=batch), [batch] * 3)
    known = jax.device_put(state, NamedSharding(second.mesh, P()))
    there = reshard(second, known, Spread.of(state))

    def owed_in_all(train, state):
        return sum_owed(
            train.schedule.phases[0],
            train.gradients_form(state),
            train,
            Spread.of(state),
            state.in_flight.codec_states,
        )

    wanted = np.array(owed_in_all(first, state))
    assert np.abs(wanted).max() > 1, "nothing to hand on"
    np.testing.assert_allclose(owed_in_all(second, there), wanted, rtol=1e-4, atol=1e-4)

"""Tests the choice of delayed gradients against a search over all choices."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import strategies

import pipejax as pj
from pipejax.overlap._least_delay import fewest

from ..train_step.refusals import refused

LAYERS = 6


def loss_fn(params, batch):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def least(exchange, **times):
    train = pj.make_train_step(loss_fn, optax.adam(0.1), mesh=pj.data_mesh(2))
    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * LAYERS
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    state = train.abstract_state(params)
    return pj.overlap.least_delay(
        train, state, batch, **{"compute": 1.0, "exchange": exchange} | times
    )


def ends(ready, seconds, late):
    """Returns when the last exchange ends, one after another on a link."""
    now = sum(x for x, flag in zip(seconds, late, strict=True) if flag)
    rest = sorted(
        (r, x) for r, x, flag in zip(ready, seconds, late, strict=True) if not flag
    )
    for r, x in rest:
        now = max(now, r) + x
    return now


GRADIENTS = strategies.lists(
    strategies.tuples(strategies.integers(0, 10), strategies.integers(1, 5)),
    min_size=1,
    max_size=6,
)


@hypothesis.given(GRADIENTS, strategies.integers(1, 30))
def test_chosen_delay_hides_all_with_the_fewest(gradients, compute):
    ready, seconds = zip(*gradients, strict=True)
    late = fewest(ready, seconds, compute)
    if sum(seconds) > compute:
        assert all(late)
        return
    assert ends(ready, seconds, late) <= compute
    # No gradient that is computed after one at once is itself at once without need.
    order = sorted(range(len(ready)), key=lambda i: ready[i])
    counts = [
        count
        for count in range(len(order) + 1)
        if ends(ready, seconds, [i in order[count:] for i in range(len(order))])
        <= compute
    ]
    assert late.count(False) == max(counts)


@pytest.mark.parametrize(("exchange", "count"), [(0.0, 0), (0.99, 3), (1.01, LAYERS)])
def test_slower_links_delay_more(exchange, count):
    found = least(exchange)
    assert found == [i < count for i in range(LAYERS)]


def test_delay_grows_with_the_exchange():
    counts = [least(x).count(True) for x in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert counts == sorted(counts)
    assert all(a != b for a, b in itertools.pairwise((counts[0], counts[-1])))


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ({"compute": 0.0}, "`compute` must be a number of seconds above 0, got 0.0"),
        ({"compute": "a"}, "`compute` must be a number of seconds above 0, got 'a'"),
        ({"exchange": -1.0}, "`exchange` must be a number of seconds of at least 0"),
        ({"exchange": float("nan")}, "`exchange` must be a number of seconds"),
    ],
)
def test_impossible_times_are_refused(times, says):
    with refused(says):
        least(**{"exchange": 0.5} | times)


def test_local_step_is_refused():
    train = pj.make_local_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(2))
    args = train, train.abstract_state([jnp.eye(8)]), jnp.ones((4, 8))
    message = r"`train` must be a pj.TrainStep, got a LocalTrainStep. .* a pipeline"
    with pytest.raises(ValueError, match=message):
        pj.overlap.least_delay(*args, compute=1.0, exchange=1.0)


def test_places_without_parameters_have_no_flag():
    """Equinox puts `None` in the place of what is not an array."""

    def loss(params, batch):
        return loss_fn([layer["w"] for layer in params], batch)

    layers = [
        {"activation": None, "w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
        for _ in range(LAYERS)
    ]
    train = pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(2))
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    args = train, train.abstract_state(layers), batch
    found = pj.overlap.least_delay(*args, compute=1.0, exchange=0.9)
    assert [layer["w"] for layer in found] == [True] * 3 + [False] * 3
    assert all(layer["activation"] is None for layer in found)


def test_frozen_parameters_take_no_time_of_the_exchange():
    def loss(params, batch):
        return loss_fn(params["trained"], batch @ params["frozen"])

    def flags(rows):
        form = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
        layers = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * LAYERS
        labels = {"frozen": "frozen", "trained": ["trained"] * LAYERS}
        kinds = {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}
        tx = optax.partition(kinds, labels)
        train = pj.make_train_step(loss, tx, mesh=pj.data_mesh(2))
        batch = jax.ShapeDtypeStruct((4, rows), jnp.float32)
        params = {"frozen": form, "trained": layers}
        state = train.abstract_state(params, batch=batch)
        times = {"compute": 1.0, "exchange": 0.9}
        return pj.overlap.least_delay(train, state, batch, **times)["trained"]

    assert flags(8) == flags(16) == [True] * 3 + [False] * 3

"""Tests that a change of the number of devices loses nothing that was to be sent."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.reshard import Spread, reshard, shapes_on, sum_owed

from .helpers import batches

FULL = pytest.mark.full
KEY = jax.random.key(0)
SIGN = codecs.error_feedback(codecs.sign(8))
ALL_REDUCES = {
    "two_shot": collectives.two_shot(SIGN),
    "ring": collectives.ring(SIGN),
    "halving_doubling": collectives.halving_doubling(SIGN),
    "tree": collectives.tree(SIGN),
    "parameter_server": collectives.parameter_server(SIGN),
    "tree, power_sgd": collectives.tree(
        codecs.error_feedback(codecs.power_sgd(1, KEY))
    ),
    "psum, power_sgd": collectives.psum(
        codecs.error_feedback(codecs.power_sgd(1, KEY))
    ),
    "ring, stochastic": collectives.ring(
        codecs.error_feedback(codecs.stochastic(codecs.int4(8), KEY))
    ),
    "scheduled": collectives.scheduled(
        [collectives.ring(SIGN), collectives.two_shot(SIGN)], [2]
    ),
}
HIERARCHICAL = {
    "outer": collectives.hierarchical(outer=collectives.two_shot(SIGN)),
    "both": collectives.hierarchical(
        collectives.two_shot(SIGN), collectives.halving_doubling(SIGN)
    ),
    "inner": collectives.hierarchical(collectives.ring(SIGN)),
}


RATE = 0.5


def linear(params, batch):
    """Returns a loss whose gradient depends on the batch, but not on the parameters."""
    product = jnp.einsum("bi,ij,bj->b", batch["x"], params["w"], batch["y"])
    half = batch["y"] * params["half"][None, :].astype(jnp.float32)
    return jnp.mean(product + half.sum(1))


def params():
    return {"w": jnp.zeros((5, 3)), "half": jnp.zeros(3, jnp.bfloat16)}


@functools.cache
def train_step(all_reduce, devices, hosts=None, width=1):
    axis_name = "data" if hosts is None else ("host", "device")
    return pj.make_train_step(
        linear,
        optax.sgd(RATE),
        mesh=pj.data_mesh(devices, axis_name=axis_name, hosts=hosts),
        axis_name=axis_name,
        all_reduce=all_reduce,
        width=width,
    )


def run(train, state, data):
    for batch in data:
        state, _ = train.step(state, batch)
    return state


def moved(train, state):
    """Returns the state as a checkpoint restores it, replicated where it was."""
    before = Spread.of(state)
    like = jax.eval_shape(lambda: train.init(params()))
    shapes = shapes_on(train, like, before)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
    everywhere = NamedSharding(train.mesh, P())
    known = jax.device_put(jax.tree.map(np.asarray, state), everywhere)
    return reshard(train, known, before)


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


@functools.cache
def on(mesh, axis_name, name):
    """Returns a train step on a mesh, and a state after some steps."""
    train = pj.make_train_step(
        linear,
        optax.sgd(RATE),
        mesh=mesh,
        axis_name=axis_name,
        all_reduce=(ALL_REDUCES | HIERARCHICAL)[name],
    )
    return train, run(train, train.init(params()), batches(3, size=24))


@pytest.mark.parametrize(
    "name", ["psum, power_sgd", pytest.param("ring, stochastic", marks=FULL)]
)
@pytest.mark.parametrize("axis_name", ["batch", ("host", "device")])
def test_axes_of_other_names_are_no_other_devices(axis_name, name):
    _, state = on(pj.data_mesh(4), "data", name)
    train, other = on(pj.data_mesh(4, axis_name=axis_name), axis_name, name)
    assert Spread.of(state).same_as(Spread.of(other), train)
    assert Spread.of(other) == Spread.now(train, other)


@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")
def test_codecs_on_other_inner_axes_are_those_of_other_shards():
    _, state = on(pj.data_mesh(4), "data", "psum, power_sgd")
    inner = pj.data_mesh(8, axis_name=("data", "model"), hosts=4)
    train, other = on(inner, "data", "psum, power_sgd")
    assert Spread.of(other) == Spread.now(train, other)
    assert Spread.of(other) == Spread(4, {"data": 4}, {"model": 2})
    with pytest.raises(ValueError, match=r"must have the inner axes \{\} of the check"):
        Spread.of(state).same_as(Spread.of(other), train)


def test_axes_that_an_all_reduce_tells_apart_keep_their_names():
    before, now = ("a", "b"), ("host", "device")
    _, state = on(pj.data_mesh(4, axis_name=before, hosts=2), before, "outer")
    train, other = on(pj.data_mesh(4, axis_name=now, hosts=2), now, "outer")
    with pytest.raises(ValueError, match=r"`train` must have the axes \('a', 'b'\)"):
        Spread.of(state).same_as(Spread.of(other), train)


def test_what_is_not_finite_stays_so_and_is_skipped():
    first, second = (
        train_step(ALL_REDUCES["two_shot"], 4, width=2),
        train_step(ALL_REDUCES["two_shot"], 2, width=2),
    )
    bad = batches(1, size=24)[0]
    bad["x"][0, 0] = np.nan
    state = run(first, first.init(params()), [*batches(2, size=24), bad])
    drained, _ = second.drain(moved(second, state))
    assert int(drained.skipped) == 1
    assert np.isfinite(drained.params["w"]).all()


def test_leaves_without_elements():
    def make(devices):
        def loss(params, batch):
            return (params["w"] * batch).mean()

        return pj.make_train_step(loss, optax.sgd(RATE), mesh=pj.data_mesh(devices))

    like = {"w": jnp.ones(()), "flat": jnp.zeros((0, 5)), "thin": jnp.zeros((5, 0))}
    first, second = make(4), make(2)
    state = run(first, first.init(like), [np.ones(8, np.float32)] * 2)
    known = jax.device_put(state, NamedSharding(second.mesh, P()))
    state, _ = second.drain(reshard(second, known, Spread.of(state)))
    assert float(state.params["w"]) == 1 - 2 * RATE
    assert state.params["flat"].shape == (0, 5)
    assert state.params["thin"].shape == (5, 0)


@pytest.mark.parametrize("devices", [41, 47, 55, 61])
def test_what_is_in_flight_stays_so(devices):
    """The float32 mean of 41 ones is below 1, and would be 0 as an integer."""
    train = train_step(collectives.psum(), 1, width=2)
    state = run(train, train.init(params()), batches(1, size=24))
    each = jax.tree.map(
        lambda x: jnp.concatenate([x] * devices),
        state.in_flight._replace(codec_states={}),
    )
    before = Spread(devices, None)
    state = reshard(train, state._replace(in_flight=each), before)
    assert state.in_flight.filled.tolist() == [1]


@functools.cache
def weighted(devices, codec=None):
    """Makes a train step whose examples have more weight on later devices."""

    def loss(params, batch):
        weight = batch["n"].sum()
        each = (batch["x"] @ params) * batch["n"]
        return each.sum() / weight, pj.Aux(weight=weight)

    all_reduce = codec and collectives.two_shot(codec)
    return pj.make_train_step(
        loss,
        optax.sgd(RATE),
        mesh=pj.data_mesh(devices),
        all_reduce=all_reduce or collectives.psum(),
    )


@pytest.mark.parametrize("now", [1, 6])
def test_weights_are_those_of_the_batch_on_any_devices(now):
    batch = {"x": batches(1, size=12)[0]["x"], "n": np.arange(1.0, 13, dtype="f4")}
    first, second = weighted(4), weighted(now)
    state = first.init(jnp.zeros(5), batch=batch)
    state = run(first, state, [batch])
    wanted, (info,) = first.drain(state)
    known = jax.device_put(state, NamedSharding(second.mesh, P()))
    drained, (found,) = second.drain(reshard(second, known, Spread.of(state)))
    np.testing.assert_allclose(drained.params, wanted.params, rtol=1e-5)
    np.testing.assert_allclose(found.loss, info.loss, rtol=1e-5)
    assert float(found.weight) == float(info.weight) == 78


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

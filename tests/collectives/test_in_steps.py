"""Tests codec states in train steps: executors agree, and skipped steps keep none."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import pipejax as pj
from pipejax import codecs, collectives

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from .cases import KEY

pytestmark = pytest.mark.one_python  # every executor and algorithm compiles steps
feedback = codecs.error_feedback
RBG = jax.random.key(0, impl="rbg")  # halves the compile time
STATEFUL = {
    "two_shot": collectives.two_shot(feedback(codecs.sign(8))),
    "psum power_sgd": collectives.psum(feedback(codecs.power_sgd(1, KEY))),
    "ring stochastic": collectives.ring(codecs.stochastic(codecs.int4(8), RBG)),
    "scheduled": collectives.scheduled(
        [collectives.psum(), collectives.two_shot(feedback(codecs.int4(8)))], [3]
    ),
    "hierarchical": collectives.hierarchical(
        outer=collectives.ring(feedback(codecs.truncate()))
    ),
}
HOSTS = ("host", "device")


def make(name, width, executor):
    axis, hosts = (HOSTS, 2) if name == "hierarchical" else ("data", None)
    return pj.make_train_step(
        loss_fn,
        optax.adamw(1e-2),
        mesh=pj.data_mesh(4, axis_name=axis, hosts=hosts),
        axis_name=axis,
        width=width,
        warmup_steps=int(name in ("scheduled", "hierarchical")),
        all_reduce=STATEFUL[name],
        executor=executor,
    )


made = functools.cache(make)  # compiled once for all tests


def trained(train, steps=6):
    """Returns the infos of a run, its state with gradients in flight, and drained."""
    state, infos = train.init(init_params()), []
    for batch in batches(steps):
        state, info = train.step(state, batch)
        infos.append(host(info))
    drained, _ = train.drain(state)
    assert len(set(pj.replica_digest(drained).values())) == 1
    return infos, host(state), host(drained)


def host(tree):
    return jax.tree.map(np.asarray, tree)


def kept(state):
    """Returns the states of the codecs."""
    return host(state.in_flight.codec_states)


SAME = [("hierarchical", 2)]
MORE = [("two_shot", 1), ("two_shot", 2), ("two_shot", 3)]
MORE += [("scheduled", 1), ("scheduled", 2), ("scheduled", 3)]
MORE += [("psum power_sgd", 2), ("ring stochastic", 2)]


@pytest.mark.parametrize(
    ("name", "width"),
    [*SAME, *(pytest.param(*pair, marks=pytest.mark.full) for pair in MORE)],
)
def test_both_executors_have_the_same_bits(name, width):
    """Both executors give the same bits, and so does a run that alternates them."""
    fused, thread = (made(name, width, executor) for executor in ("fused", "host"))
    wanted = trained(fused)
    assert jax.tree.leaves(kept(wanted[1]))
    assert_bits_equal(trained(thread), wanted)
    state = thread.init(init_params())
    order = [thread, fused, fused, thread, thread, fused]
    for batch, train in zip(batches(6), order, strict=True):
        state, _ = train.step(state, batch)
    assert_bits_equal(host(thread.drain(state)[0]), wanted[2])


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["two_shot", pytest.param("ring stochastic", marks=pytest.mark.full)]
)
def test_branches_from_one_state_do_not_share_codec_states(name):
    """The codec states of one branch do not affect those of the other."""
    train = made(name, 3, "host")
    state = train.init(init_params())
    first, second, third = batches(3)
    state, _ = train.step(state, first)
    train.step(state, third)
    for batch in (second, third):
        state, _ = train.step(state, batch)
    wanted = trained(made(name, 3, "fused"), 3)[2]
    assert_bits_equal(host(train.drain(state)[0]), wanted)


@pytest.mark.parametrize(
    "name", [pytest.param("two_shot", marks=pytest.mark.full), "psum power_sgd"]
)
def test_copied_gradients_are_summed_on_one_device_with_one_residual(name):
    """Gradients are copied to one CPU device, as from a GPU, and added up before.

    The one CPU device then sums alone, and has one residual instead of four.
    """
    train = make(name, 2, "host")
    other = Mesh(np.array(jax.devices()[7:]), ("data",))
    train.executor.__dict__["reduction_mesh"] = other  # cached_property stores it here
    infos, state, drained = trained(train)
    wanted, four, _ = trained(made(name, 2, "fused"))
    # The loss of the first batch has the same parameters, and travels unencoded.
    assert infos[1].loss == wanted[1].loss
    assert sum(x.size for x in residuals(state)) < sum(x.size for x in residuals(four))
    assert all(np.abs(x).max() > 0 for x in residuals(state))
    assert drained.params["out"].shape == (7, 3)
    assert_bits_equal(trained(train), (infos, state, drained))


def residuals(state):
    sites = state.in_flight.codec_states.values()
    leaves = [jax.tree.leaves(site.residual) for site in sites]
    return [np.concatenate([np.ravel(x) for x in own]) for own in leaves]


def poisoned(at, steps):
    """Returns batches in which one device's share has a NaN in step `at`."""
    data = batches(steps)
    data[at]["y"][6, 1] = np.nan
    return data


@grid(
    1, executor=["fused", "host"], width=[3, 2, 1], name=["two_shot", "psum power_sgd"]
)
def test_skipped_step_keeps_codec_states(name, width, executor):
    """A skipped step keeps codec states bit by bit, and so does one without a message.

    Then follow a drain, which does feed back, and steps that fill the pipeline anew.
    """
    train, at = made(name, width, executor), 2
    state = train.init(init_params())
    for batch in poisoned(at, 6):
        before, (state, info) = kept(state), train.step(state, batch)
        assert_kept_if_applied(info, before, state)
    assert int(state.skipped) == 1
    before, state = kept(state), train.drain(state)[0]
    assert differs(before, kept(state)) == (width > 1)
    for i, batch in enumerate(batches(4)):
        before, (state, info) = kept(state), train.step(state, batch)
        assert bool(info.applied) == (i >= width - 1)
        assert_kept_if_applied(info, before, state)
    state, _ = train.drain(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept(state)))


def assert_kept_if_applied(info, before, state):
    assert differs(before, kept(state)) == bool(info.applied)


def differs(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(not np.array_equal(x, y, equal_nan=False) for x, y in pairs)


@grid(1, width=[3, 2], executor=["fused", "host"])
def test_skip_in_the_drain_keeps_feedback_of_the_others(width, executor):
    """The drain skips the newest, bad gradient, and keeps the others' feedback."""
    train = made("two_shot", width, executor)
    state = train.init(init_params())
    for batch in poisoned(2, 3):
        state, _ = train.step(state, batch)
    drained, _ = train.drain(state)
    assert int(drained.skipped) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept(drained)))
    assert differs(kept(state), kept(drained)) == (width > 2)

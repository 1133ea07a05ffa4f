"""Tests what delayed parameters count by themselves."""

import jax
import optax
import pytest

import pipejax as pj
from pipejax import codecs

from ...helpers import batches, init_params, loss_fn

RANK_1 = codecs.power_sgd(1, jax.random.key(1))
DELAYED = {"hidden": True, "bias": False, "out": True}


def counters(tx, **settings):
    """Returns the paths of the counters before the first step, without their ends."""
    settings = {"delayed": DELAYED} | settings
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(2), **settings)
    state = train.init(init_params())
    found = jax.tree_util.tree_leaves_with_path(state.delayed_counters)
    return {jax.tree_util.keystr(path) for path, _ in found}


INJECTED = optax.inject_hyperparams(optax.adam)
SCHEDULE = optax.linear_schedule(0.1, 0.0, 9)


@pytest.mark.parametrize(
    ("tx", "paths"),
    [
        (optax.sgd(0.1, momentum=0.9), set()),
        (optax.adam(0.1), {"[0].count"}),
        (optax.adam(SCHEDULE), {"[0].count", "[1].count"}),
        (INJECTED(0.1), {".count", ".inner_state[0].count"}),
        (optax.flatten(optax.trace(0.9)), {".trace"}),
    ],
)
def test_changing_leaves_of_no_parameter_are_counters(tx, paths):
    assert counters(tx) == paths


def test_hyperparameters_of_a_wrapped_optimizer_are_no_counters():
    """The wrapper selects from two states, so that all leaves change."""
    found = counters(optax.apply_if_finite(INJECTED(0.1), 3))
    assert ".inner_state.count" in found
    assert not any("hyperparams[" in path for path in found)


@pytest.mark.parametrize(
    "settings", [{"delayed": None}, {"delayed": None, "at_once": RANK_1}, {"width": 1}]
)
def test_no_counters_exist_without_two_kinds_of_parameters(settings):
    assert counters(optax.adam(0.1), **settings) == set()


def test_counters_of_delayed_parameters_lag_until_a_drain():
    train = pj.make_train_step(
        loss_fn, optax.adam(0.1), mesh=pj.data_mesh(2), width=3, delayed=DELAYED
    )
    state = train.init(init_params())
    for batch in batches(4):
        state, _ = train.step(state, batch)
    assert (state.opt_state[0].count, state.delayed_counters[0].count) == (4, 2)
    state, _ = train.drain(state)
    assert (state.opt_state[0].count, state.delayed_counters[0].count) == (4, 4)

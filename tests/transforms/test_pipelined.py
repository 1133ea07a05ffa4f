"""Tests `pj.pipelined` in a user's own loop against `make_train_step`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..grid import grid
from ..helpers import assert_bits_equal
from .flax_loop import Loop, assert_close, expected, init_params

ADAMW = optax.adamw(1e-2, weight_decay=0.1)


@grid(0, width=[2, 3, 1], check_vma=[True, False])
def test_optimizer_waits_for_the_first_gradient(width, check_vma):
    tx = pj.pipelined(ADAMW, "data", width)
    states = Loop(tx, check_vma=check_vma).run(width)
    fresh = ADAMW.init(jax.tree.map(jnp.asarray, init_params()))
    for state in states[: width - 1]:
        assert_bits_equal(state.params, init_params())
        assert_bits_equal(state.opt_state.inner_state, fresh)
    assert int(states[width - 1].opt_state.inner_state[0].count) == 1
    assert_close([s.params for s in states], expected(width, ADAMW))


@grid(
    0,
    optimizer=[ADAMW, optax.sgd(0.05, momentum=0.9)],
    width=[2, 3, 1],
    check_vma=[True, False],
)
def test_predicted_loop_equals_make_train_step(optimizer, width, check_vma):
    tx = pj.pipelined(optimizer, "data", width)
    states = Loop(tx, check_vma=check_vma, ahead=optimizer).run(width)
    wanted = expected(width, optimizer, weight_prediction=True)
    assert_close([s.params for s in states], wanted)


def test_extra_arguments_reach_the_optimizer():
    tx = pj.pipelined(optax.polyak_sgd(), "data", 1)
    params = jnp.ones(4)

    def local(value):
        state = tx.init(params)
        return tx.update(params, state, params, value=value)[0]

    mapped = jax.shard_map(
        local,
        mesh=pj.data_mesh(2),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    # Polyak's step is value / |g|^2 = 2 / 4.
    np.testing.assert_allclose(jax.jit(mapped)(jnp.float32(2)), -0.5 * np.ones(4))


@pytest.mark.parametrize(
    ("tx", "rule"),
    [
        (optax.lookahead(ADAMW, 5, 0.5), "`tx` must not hold optax.lookahead, whose"),
        (pj.pipelined_mean("data"), "`tx` must not hold pj.pipelined_mean, got one in"),
        (
            optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
            "`tx` must not hold optax.contrib.differentially_private_aggregate, which",
        ),
    ],
)
def test_optimizers_without_use_for_a_late_mean_are_refused(tx, rule):
    with pytest.raises(ValueError, match=rule):
        pj.pipelined(tx, "data").init({"w": jnp.ones(4)})


def test_function_in_place_of_an_optimizer_is_refused():
    message = r"`tx` must be an optax\.GradientTransformation.*got function"
    with pytest.raises(ValueError, match=message):
        pj.pipelined(optax.sgd, "data")
    state = pj.pipelined(optax.sgd(0.1), "data").init(jnp.ones(2))
    with pytest.raises(ValueError, match=message):
        pj.predicted_params(optax.sgd, state, jnp.ones(2))


def test_optimizer_with_a_changing_state_structure_is_refused():
    tx = pj.pipelined(optax.monitor({"norm": optax.tree.norm}), "data")
    with pytest.raises(ValueError, match="`tx` must keep the structure of its state"):
        Loop(tx).run(1)


@pytest.mark.parametrize("width", [0, 1.5])
def test_width_must_be_an_integer_of_at_least_1(width):
    with pytest.raises(ValueError, match="`width` must be an integer of at least 1"):
        pj.pipelined(ADAMW, "data", width)


def loop_of(tx, *extras):
    """Returns the last update of `tx`, after one with each of the extra arguments."""

    def run(*arguments):
        state, found = tx.init(jnp.ones(2)), None
        for extra in arguments:
            found, state = tx.update(jnp.ones(2), state, jnp.ones(2), **extra)
        return found

    mesh = pj.data_mesh(2)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return mapped(*extras)


@pytest.mark.parametrize("width", [1, 2])
def test_extra_argument_taken_by_name_reaches_the_optimizer(width):
    def update(updates, state, params=None, **extra):
        return jax.tree.map(lambda x: extra["factor"] * x, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    found = loop_of(pj.pipelined(tx, "data", width), *[{"factor": 3.0}] * width)
    np.testing.assert_array_equal(found, [3, 3])


@pytest.mark.full
def test_extra_arguments_reach_an_optimizer_in_multi_steps():
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    tx = pj.pipelined(optax.MultiSteps(plateau, 2), "data", 1)
    found = loop_of(tx, *[{"value": jnp.float32(1)}] * 2)
    np.testing.assert_allclose(found, [-0.1, -0.1], rtol=1e-6)


def test_optimizer_with_a_collective_begins_only_with_a_bound_axis():
    def update(updates, state, params=None):
        return jax.lax.pmean(updates, "model"), state

    tx = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ValueError, match=r"^`init` must be called where the axes are"):
        jax.eval_shape(pj.pipelined(tx, "data", 2).init, jnp.ones(2))


def test_complex_parameters_with_a_prediction_are_refused():
    tx = pj.pipelined(optax.adam(0.1), "data")
    with pytest.raises(ValueError, match="`params` must be floating arrays"):
        tx.init({"w": jnp.zeros(3, jnp.complex64)})


def test_reduce_dtype_of_a_loop_must_be_floating():
    with pytest.raises(ValueError, match="`reduce_dtype` must be"):
        pj.pipelined(optax.sgd(0.1), "data", reduce_dtype=jnp.int8)

"""Tests that a user's loop with a transform equals `make_train_step`."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import collectives, transforms

from ..grid import each, grid
from ..helpers import batches, init_params, loss_fn, trajectory
from .loops import DEVICES, HOSTS, hierarchical, int4, int8, sign, top_k

STEPS = 6
CASES = {
    "psum": collectives.psum(),
    "two_shot": collectives.two_shot(int8),
    "two_shot sign": collectives.two_shot(sign),
    "ring": collectives.ring(int4),
    "parameter_server top_k": collectives.parameter_server(top_k),
    "hierarchical": hierarchical(int8),
}


def mesh_of(name):
    """Returns the mesh and the axis names of `make_train_step`."""
    if name == "hierarchical":
        mesh = pj.data_mesh(DEVICES, axis_name=HOSTS, hosts=2)
        return {"mesh": mesh, "axis_name": HOSTS}
    return {"mesh": pj.data_mesh(DEVICES), "axis_name": "data"}


def by_hand(tx, mesh, axis_name):
    """Returns the parameters after every step of a loop as users write it."""
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    state = jax.eval_shape(mapped(tx.init, in_specs=P(), out_specs=P()), init_params())
    specs = pj.state_specs(state, axis_name)

    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    init = jax.jit(mapped(tx.init, in_specs=P(), out_specs=specs))
    step = mapped(step, in_specs=(P(), specs, P(axis_name)), out_specs=(P(), specs))
    step, params, out = jax.jit(step), init_params(), []
    state = init(params)
    for batch in batches(STEPS):
        params, state = step(params, state, batch)
        out.append(params)
    return out


def by_train_step(width, all_reduce, **settings):
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        width=width,
        all_reduce=all_reduce,
        weight_prediction=False,
        **settings,
    )
    return trajectory(train, init_params(), batches(STEPS), drain=False)


def assert_close(got, wanted):
    # Two programs may contract multiplications with additions in different places. The
    # bound is derived in train_step/test_step.py.
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    bound = 4 * STEPS * np.finfo(np.float32).eps / 2 * largest
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "name",
    each(CASES, full=["two_shot", "ring", "parameter_server top_k", "hierarchical"]),
)
def test_pipelined_mean_of_width_1_equals_the_train_step(name):
    check(name, 1)


@pytest.mark.full
@grid(1, name=["two_shot sign", "hierarchical"], width=[2, 3])
def test_pipelined_mean_of_any_width_equals_the_train_step(width, name):
    check(name, width)


def check(name, width):
    all_reduce, settings = CASES[name], mesh_of(name)
    first = transforms.pipelined_mean(
        settings["axis_name"], width, all_reduce=all_reduce
    )
    got = by_hand(optax.chain(first, optax.sgd(0.1)), **settings)
    assert_close(got, by_train_step(width, all_reduce, **settings))

"""Tests where the arrays of a state lie, with and without inner axes."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.executors import in_flight_shardings, state_shardings
from pipejax._core.step import common_of

from ...helpers import init_params, loss_fn


def make(mesh, **options):
    return pj.make_train_step(
        loss_fn, optax.adamw(1e-2), mesh=mesh, axis_name="host", **options
    )


@pytest.mark.parametrize("inner", [1, 2])
def test_every_array_has_a_sharding_of_its_mesh(inner):
    mesh = pj.data_mesh(2 * inner, axis_name=("host", "fsdp"), hosts=2)
    if inner == 1:
        mesh = pj.data_mesh(2, axis_name="host")
    train = make(mesh, width=3)
    params = init_params()
    if inner == 2:
        place = NamedSharding(mesh, P("fsdp"))
        params |= {"out": jax.device_put(np.zeros((8, 3), np.float32), place)}
    state = train.abstract_state(params)
    specs = state_shardings(common_of(state), mesh, "host")
    in_flight = in_flight_shardings(state.in_flight, train.config)
    for found in (specs, in_flight):
        assert all(x.mesh == mesh for x in jax.tree.leaves(found))
    split = P("fsdp") if inner == 2 else P()
    params, moments = specs.trainable.params, specs.trainable.opt_state[0].mu
    assert params["out"].spec == moments["out"].spec == split
    assert specs.step.spec == params["bias"].spec == P()
    own = P(("host", "fsdp")) if inner == 2 else P("host")
    for message in in_flight.pending:
        assert message.gradients["out"].spec == own
        assert message.passengers.values.spec == P("host")
    everywhere = in_flight_shardings(state.in_flight, train.config, whole=True)
    assert everywhere.pending[0].gradients["out"].spec in (split, P(None))
    assert jax.tree.structure(specs) == jax.tree.structure(common_of(state))


def test_arrays_without_elements_are_replicated():
    train = make(pj.data_mesh(2, axis_name="host"))
    state = train.abstract_state(init_params() | {"none": np.zeros((0, 3), np.float32)})
    assert state.in_flight.pending[0].gradients["none"].sharding.spec == P()

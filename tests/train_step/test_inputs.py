"""Tests the inputs of a step as they lie on a mesh."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.train_step._inputs import inputs_on_mesh

from ..helpers import batches, loss_fn


def config(axis_name, hosts=None):
    names = ("host", "fsdp") if hosts else axis_name
    mesh = pj.data_mesh(4, axis_name=names, hosts=hosts)
    return pj.make_train_step(
        loss_fn, optax.sgd(0.1), mesh=mesh, axis_name=axis_name
    ).config


def test_inputs_on_devices_have_no_specs():
    (batch,) = batches(1)
    found = inputs_on_mesh(config("data"), batch, {"scale": 0.5})
    assert found.specs.batch == found.specs.shared == ()
    assert found.shared == {"scale": 0.5}


def test_inputs_of_groups_have_specs_over_inner_axes():
    own = config("host", hosts=2)
    place = NamedSharding(own.mesh, P(("host", "fsdp")))
    batch = jax.device_put(batches(1)[0], place)
    shift = jax.device_put(np.ones(4, np.float32), NamedSharding(own.mesh, P("fsdp")))
    found = inputs_on_mesh(own, batch, shift)
    assert found.specs.batch == (P("fsdp"), P("fsdp"))
    assert found.specs.shared == (P("fsdp"),)


def test_batch_with_a_remainder_is_refused():
    with pytest.raises(ValueError, match="batch"):
        inputs_on_mesh(config("data"), batches(1, size=6)[0], None)

"""Tests hand-written loops in which groups of devices shard the model."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives

from ..helpers import batches, init_params, loss_fn

TX = optax.adamw(1e-2)


def trained(mesh, split, all_reduce):
    """Returns the parameters after some predicted steps of a loop by hand."""
    tx = pj.pipelined(TX, "host", width=2, all_reduce=all_reduce)
    on = {"mesh": mesh, "check_vma": False, "axis_names": {"host"}}

    def placed(leaf):
        even = split and leaf.shape[-1] % 2 == 0
        spec = P(*(leaf.ndim - 1) * (None,), "fsdp") if even else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    def step(params, opt_state, batch):
        ahead = pj.predicted_params(TX, opt_state, params)
        updates, opt_state = tx.update(
            jax.grad(loss_fn)(ahead, batch), opt_state, params
        )
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(placed, init_params())
    create = jax.shard_map(tx.init, in_specs=P(), out_specs=P(), **on)
    specs = pj.state_specs(jax.eval_shape(create, params), "host")
    create = jax.shard_map(tx.init, in_specs=P(), out_specs=specs, **on)
    opt_state = jax.jit(create)(params)
    program = jax.jit(
        jax.shard_map(
            step, in_specs=(P(), specs, P("host")), out_specs=(P(), specs), **on
        )
    )
    for batch in batches(5):
        params, opt_state = program(params, opt_state, batch)
    return params


@pytest.mark.parametrize(
    "all_reduce",
    [
        collectives.psum(),
        pytest.param(
            collectives.two_shot(codecs.error_feedback(codecs.int8(8))),
            marks=pytest.mark.full,
        ),
    ],
)
def test_groups_train_like_single_devices(all_reduce):
    flat = trained(pj.data_mesh(2, axis_name="host"), False, all_reduce)
    inner = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    found = trained(inner, True, all_reduce)
    for leaf, wanted in zip(*map(jax.tree.leaves, (found, flat)), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=0, atol=1e-5)

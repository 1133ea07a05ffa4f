"""Tests Optax transformations under JAX's switches of dtypes, checks and transfers."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives, transforms

from ..grid import grid
from ..helpers import assert_bits_equal, batches, init_params, loss_fn
from ..switches import SWITCHES, switched

STEPS, DEVICES, KEY = 4, 4, jax.random.key(0)
INT8 = codecs.error_feedback(codecs.int8(8))
# Optax's Adam fails under strict promotion.
CHAINS = {
    "pipelined": lambda: pj.pipelined(optax.sgd(0.1, momentum=0.9), "data", width=2),
    "mean, coded": lambda: optax.chain(
        pj.pipelined_mean("data", width=2, all_reduce=collectives.two_shot(INT8)),
        optax.sgd(0.1),
    ),
    "drawn": lambda: optax.chain(
        transforms.compress(codecs.stochastic(codecs.int4(8), KEY)),
        pj.pipelined_mean(
            "data", width=2, all_reduce=collectives.psum(codecs.random_k(0.5, KEY))
        ),
        optax.sgd(0.1),
    ),
    "compress": lambda: optax.chain(
        transforms.compress(codecs.error_feedback(codecs.top_k(0.2))),
        pj.pipelined_mean("data", width=1),
        optax.sgd(0.1, momentum=0.9),
    ),
}


def trained(name):
    """Returns the parameters after a loop by hand, inside `shard_map`."""
    tx, mesh = CHAINS[name](), pj.data_mesh(DEVICES)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def step(params, state, batch):
        gradients = jax.grad(loss_fn)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_put(init_params(), NamedSharding(mesh, P()))
    place = NamedSharding(mesh, P("data"))
    data = [jax.device_put(batch, place) for batch in batches(STEPS)]
    shapes = jax.eval_shape(mapped(tx.init, in_specs=P(), out_specs=P()), params)
    specs = pj.state_specs(shapes)
    state = jax.jit(mapped(tx.init, in_specs=P(), out_specs=specs))(params)
    in_specs, out_specs = (P(), specs, P("data")), (P(), specs)
    stepped = jax.jit(mapped(step, in_specs=in_specs, out_specs=out_specs))
    for batch in data:
        params, state = stepped(params, state, batch)
    return jax.device_get(params)


unswitched = functools.cache(trained)


@grid(1, switch=list(SWITCHES), name=list(CHAINS))
def test_jax_switches_change_no_bit(switch, name):
    wanted = unswitched(name)
    with switched(*SWITCHES[switch]):
        got = trained(name)
    assert_bits_equal(got, wanted)


@pytest.mark.parametrize("name", CHAINS)
def test_float32_under_x64_is_close(name):
    """The learning rate may be rounded in another place."""
    wanted = unswitched(name)
    with jax.enable_x64(True):
        got = trained(name)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)

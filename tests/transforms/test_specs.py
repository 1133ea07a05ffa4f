"""Tests which parts of a state differ between devices."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, transforms

TREE = {"w": jnp.zeros((8, 12)), "b": jnp.zeros(5)}


def test_specs_split_compression_and_pipeline_states_only():
    """The first two states differ between devices, and all others are shared."""
    tx = optax.chain(
        transforms.compress(codecs.error_feedback(codecs.sign(8))),
        transforms.pipelined_mean("data", width=2),
        optax.adam(1e-3),
    )
    specs = pj.state_specs(jax.eval_shape(tx.init, TREE), "rows")
    assert specs[:2] == (P("rows"), P("rows"))
    assert set(jax.tree.leaves(specs[2])) == {P()}


def test_specs_of_a_nested_pipeline_name_both_axes():
    """A pipeline is one leaf of the specs at any place, which shard_map accepts."""
    tx = pj.pipelined(optax.sgd(0.1, momentum=0.9), ("host", "device"))
    state = {"step": jnp.zeros(()), "inner": [tx.init(TREE)]}
    specs = pj.state_specs(state, ("host", "device"))
    own = P(("host", "device"))
    assert specs["step"] == P()
    assert specs["inner"][0].in_flight == own
    assert set(jax.tree.leaves(specs["inner"][0].inner_state)) == {P()}


def test_specs_share_the_state_of_a_plain_optimizer():
    state = optax.adam(1e-3).init(TREE)
    assert set(jax.tree.leaves(pj.state_specs(state))) == {P()}

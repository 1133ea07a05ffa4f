"""Tests the partition specs of a group, and how they are combined."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from pipejax._internal.shards import (
    Shards,
    combined_spec,
    data_axes_of,
    of_all_groups,
    optimizer_specs,
    shard_form,
    split_axes,
)

SIZES = {"fsdp": 2, "tp": 4, "one": 1}


def test_shards_are_empty_without_inner_axes():
    assert not Shards()
    assert Shards((P(),))
    assert jax.tree.leaves(Shards((P("fsdp"),))) == []


def test_axes_and_shape_of_a_shard_follow_its_spec():
    assert split_axes(P(("fsdp", "one"), None, "tp"), SIZES) == {"fsdp", "tp"}
    form = jax.ShapeDtypeStruct((4, 3, 8), jnp.bfloat16)
    shard = shard_form(form, P("fsdp", None, ("tp", "one")), SIZES)
    assert (shard.shape, shard.dtype) == ((2, 3, 2), jnp.bfloat16)


OPTIMIZERS = [
    optax.adamw(1e-3),
    optax.sgd(0.1, momentum=0.9),
    optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
    optax.MultiSteps(optax.adam(1e-3), 2),
    optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    optax.contrib.muon(1e-3),
]


@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_moments_are_split_like_their_parameters(tx):
    params = {"b": jnp.zeros(4), "w": jnp.zeros((4, 6))}
    specs = (P(), P(None, "fsdp"))
    opt_state = jax.eval_shape(tx.init, params)
    found = optimizer_specs(opt_state, params, specs)
    pairs = zip(jax.tree.leaves(opt_state), jax.tree.leaves(found), strict=True)
    split = [leaf.shape for leaf, spec in pairs if spec == P(None, "fsdp")]
    matrices = [x.shape for x in jax.tree.leaves(opt_state) if x.shape == (4, 6)]
    assert split == matrices != []


def test_specs_for_all_groups_begin_with_the_outer_axes():
    assert of_all_groups(P(), "host") == P("host")
    assert of_all_groups(P(), ()) == P(None)
    assert of_all_groups(P("fsdp", "tp"), ()) == P("fsdp", "tp")
    assert of_all_groups(P(("a", "b")), ("host", "c")) == P(("host", "c", "a", "b"))


def test_axes_of_size_one_leave_an_axis_to_the_data():
    """A spec may name them on a mesh with Explicit axes."""
    params, spec = {"w": jnp.zeros((6, 4))}, P("one", "tp")
    assert data_axes_of(params, (spec,), 2, SIZES) == (0,)
    assert combined_spec(spec, P("host")) == P(("host", "one"), "tp")

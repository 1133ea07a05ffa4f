"""Tests the partition specs of a group: how they are found, checked and combined."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.mesh import on_mesh
from pipejax.shards import (
    Shards,
    constrained,
    group_axes,
    inner_specs,
    of_all_groups,
    on_shards,
    optimizer_specs,
    shard_form,
    split_axes,
)

SIZES = {"fsdp": 2, "tp": 4, "one": 1}


def mesh():
    return pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)


def test_specs_say_nothing_on_a_mesh_without_inner_axes():
    assert not Shards()
    assert Shards((P(),))
    assert jax.tree.leaves(Shards((P("fsdp"),))) == []


def test_specs_are_read_from_arrays_and_shapes():
    on = mesh()
    split = NamedSharding(on, P(None, "fsdp", None))
    tree = {
        "array": jax.device_put(np.ones((2, 4, 2)), split),
        "shape": jax.ShapeDtypeStruct((2, 4, 2), jnp.float32, sharding=split),
        "none": jax.ShapeDtypeStruct((2,), jnp.float32),
        "numpy": np.ones(3),
        "here": jnp.ones(3),
    }
    by_name = dict(
        zip(sorted(tree), inner_specs("params", tree, on, "host"), strict=True)
    )
    assert by_name.pop("array") == by_name.pop("shape") == P(None, "fsdp")
    assert set(by_name.values()) == {P()}


@pytest.mark.parametrize(
    ("axis_name", "rule"),
    [
        (
            ("host", "fsdp"),
            r"`params\['w'\]` must be replicated on a mesh whose axes all",
        ),
        ("fsdp", r"`params\['w'\]` must not be sharded over 'fsdp', over which"),
    ],
)
def test_arrays_that_no_group_can_shard(axis_name, rule):
    on = mesh()
    w = jax.device_put(np.ones(4), NamedSharding(on, P("fsdp")))
    with pytest.raises(ValueError, match=rule):
        inner_specs("params", {"w": w}, on, axis_name)


def test_shapes_that_do_not_divide():
    """JAX refuses such arrays itself, but not their shapes."""
    sharding = NamedSharding(mesh(), P(None, "fsdp"))
    w = jax.ShapeDtypeStruct((2, 5), jnp.float32, sharding=sharding)
    rule = r"`params\['w'\]` must divide among the devices along 'fsdp': got axis 1 of"
    with pytest.raises(ValueError, match=rule):
        inner_specs("params", {"w": w}, mesh(), "host")


def test_a_sharding_that_names_no_axes():
    class Nameless:
        is_fully_replicated = False

    w = types.SimpleNamespace(sharding=Nameless(), shape=(4, 2))
    with pytest.raises(ValueError, match=r"must have a jax\.sharding\.NamedSharding"):
        inner_specs("params", {"w": w}, mesh(), "host")


def test_the_axes_and_the_shape_of_a_shard():
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
def test_moments_are_split_as_their_parameters(tx):
    params = {"b": jnp.zeros(4), "w": jnp.zeros((4, 6))}
    specs = (P(), P(None, "fsdp"))
    opt_state = jax.eval_shape(tx.init, params)
    found = optimizer_specs(opt_state, params, specs)
    pairs = zip(jax.tree.leaves(opt_state), jax.tree.leaves(found), strict=True)
    split = [leaf.shape for leaf, spec in pairs if spec == P(None, "fsdp")]
    matrices = [x.shape for x in jax.tree.leaves(opt_state) if x.shape == (4, 6)]
    assert split == matrices != []


def test_specs_of_what_differs_between_groups():
    assert of_all_groups(P(), "host") == P("host")
    assert of_all_groups(P(), ()) == P(None)
    assert of_all_groups(P("fsdp", "tp"), ()) == P("fsdp", "tp")
    assert of_all_groups(P(("a", "b")), ("host", "c")) == P(("host", "c", "a", "b"))


def test_work_on_the_own_shards():
    """Each device of a group sees its part, and the inner axes of the program."""

    def local(x):
        _, inner = group_axes()
        assert inner == ("fsdp",)
        x = constrained({"x": x}, (P("fsdp"),))["x"]
        own = on_shards(
            lambda x: x + 10 * jax.lax.axis_index("fsdp"), P("fsdp"), P("fsdp")
        )
        return own(x)

    program = jax.jit(on_mesh(local, mesh(), P("host"), P("host"), "host"))
    assert program(np.zeros(8, np.int32)).tolist() == [0, 0, 10, 10] * 2


def test_without_specs_arrays_stay_as_they_are():
    tree = {"x": jnp.ones(3)}
    assert constrained(tree, ()) is tree

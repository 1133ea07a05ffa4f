"""Tests how the specs of given arrays are found and checked."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.shards import inner_specs


def mesh():
    return pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)


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
def test_arrays_sharded_over_wrong_axes_are_refused(axis_name, rule):
    on = mesh()
    w = jax.device_put(np.ones(4), NamedSharding(on, P("fsdp")))
    with pytest.raises(ValueError, match=rule):
        inner_specs("params", {"w": w}, on, axis_name)


def test_shapes_must_divide_among_the_devices():
    """JAX refuses such arrays itself, but not their shapes."""
    sharding = NamedSharding(mesh(), P(None, "fsdp"))
    w = jax.ShapeDtypeStruct((2, 5), jnp.float32, sharding=sharding)
    rule = r"`params\['w'\]` must divide among the devices along 'fsdp': got axis 1 of"
    with pytest.raises(ValueError, match=rule):
        inner_specs("params", {"w": w}, mesh(), "host")


def test_sharding_without_named_axes_is_refused():
    class Nameless:
        is_fully_replicated = False

    w = types.SimpleNamespace(sharding=Nameless(), shape=(4, 2))
    with pytest.raises(ValueError, match=r"must have a jax\.sharding\.NamedSharding"):
        inner_specs("params", {"w": w}, mesh(), "host")

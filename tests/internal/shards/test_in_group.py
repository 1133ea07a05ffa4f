"""Tests work that the devices of a group do on their own shards."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.mesh import on_mesh
from pipejax._internal.shards import (
    constrained,
    group_axes,
    on_shards,
    over_own_axes,
)


def mesh():
    return pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)


def test_each_device_works_on_its_own_shard():
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


def test_arrays_over_other_axes_get_their_types_back():
    seen = []

    def program(x):
        group = jax.sharding.get_abstract_mesh()
        explicit = group.update_axis_types({"fsdp": jax.sharding.AxisType.Explicit})
        with jax.sharding.use_abstract_mesh(explicit):
            typed = jax.sharding.reshard(x, P("fsdp"))

        def local(pair):
            seen.extend(str(jax.typeof(leaf)) for leaf in pair)
            return pair

        found = over_own_axes(local, (typed, x))
        seen.extend(str(jax.typeof(leaf)) for leaf in found)
        return x

    program = on_mesh(program, mesh(), P("host"), P("host"), "host")
    jax.eval_shape(program, np.zeros(8, np.float32))
    assert seen == ["float32[4]", "float32[4]", "float32[4@fsdp]", "float32[4]"]


def test_constrained_leaves_arrays_unchanged_without_specs():
    tree = {"x": jnp.ones(3)}
    assert constrained(tree, ()) is tree

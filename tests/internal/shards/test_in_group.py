"""Tests work that the devices of a group do on their own shards."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.mesh import on_mesh
from pipejax._internal.shards import as_auto, constrained, group_axes, on_shards


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


def test_arrays_over_explicit_axes_get_their_types_back():
    explicit = jax.make_mesh((2, 2), ("host", "fsdp"), devices=jax.devices()[:4])
    placed = jax.device_put(np.ones(4), jax.NamedSharding(explicit, P("fsdp")))
    seen = []

    def program(x, plain):
        def local(x, plain):
            seen.extend(map(str, (jax.typeof(x), jax.typeof(plain))))
            return x, plain

        return as_auto(lambda pair: local(*pair), (x, plain))

    with jax.set_mesh(explicit):
        x, plain = jax.jit(program)(placed, 1.0)
    assert seen == ["float32[4]", "float32[]"]
    assert (jax.typeof(x), plain) == (jax.typeof(placed), 1.0)


def test_constrained_leaves_arrays_unchanged_without_specs():
    tree = {"x": jnp.ones(3)}
    assert constrained(tree, ()) is tree

"""Updates of Optax, and the programs that run them on pieces of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.partitioned import Devices, on_partitions, stages_of, whole
from pipejax.collectives import run

from ...helpers import assert_bits_equal

DEVICES = Devices({"data": 4})


def arrays(seed):
    """Returns arrays that divide along the first axis, along the second, and not."""
    rng = np.random.default_rng(seed)
    shapes = {"first": (8, 3), "second": (3, 8), "whole": (3,)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def split_of(leaf):
    splits = {(8, 3): (("data",), ()), (3, 8): ((), ("data",))}
    return splits.get(leaf.shape, whole(leaf.ndim))


def planned(tx):
    """Returns an update with its arguments, and the program for pieces of them."""
    params, gradients = arrays(0), arrays(1)
    state, moved = jax.jit(tx.init)(params), jax.jit(tx.update)
    for seed in (2, 3):  # moments that are not zero
        _, state = moved(arrays(seed), state, params)

    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    args = jax.tree.map(jnp.asarray, (gradients, state, params))
    splits = list(map(split_of, jax.tree.leaves(args)))
    return update, args, splits, on_partitions(update, args, splits, DEVICES)


def on_devices(program, args, splits, count=4):
    """Runs a program on some devices, and returns its result as whole arrays."""
    devices = Devices({"data": count})

    def local(*leaves):
        stages = stages_of(program, devices)
        value, _ = run(stages, program.run(0, list(leaves)), {})
        return jax.tree.leaves(program.result(value))

    mapped = jax.shard_map(
        local,
        mesh=pj.data_mesh(count),
        in_specs=tuple(map(spec_of, splits)),
        out_specs=list(map(spec_of, program.splits)),
        check_vma=False,
    )
    return jax.tree.unflatten(program.tree, jax.jit(mapped)(*jax.tree.leaves(args)))


def spec_of(split):
    return P(*(names[0] if names else None for names in split))


def assert_close(found, wanted, rounding):
    """Asserts that two results are equal up to rounding, in values and dtypes."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.floating):
            wide = (np.asarray(x).astype(np.float64) for x in (a, b))
            np.testing.assert_allclose(*wide, rtol=rounding, atol=1e-7, strict=True)
        else:
            assert_bits_equal(_raw(a), _raw(b))


def _raw(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x

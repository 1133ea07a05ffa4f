"""Tests updates of Optax on pieces of arrays against the same updates of whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax.collectives import run
from pipejax.pieces import Devices, NotElementwiseError, on_pieces, stages_of, whole

from ..helpers import assert_bits_equal

DEVICES = Devices({"data": 4})
contrib = optax.contrib


def arrays(seed):
    """Returns arrays that divide along the first axis, along the second, and not."""
    rng = np.random.default_rng(seed)
    shapes = {"first": (8, 3), "second": (3, 8), "whole": (3,)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def split_of(leaf):
    splits = {(8, 3): (("data",), ()), (3, 8): ((), ("data",))}
    return splits.get(leaf.shape, whole(leaf.ndim))


def spec_of(split):
    return P(*(names[0] if names else None for names in split))


def planned(tx):
    """Returns an update with its arguments, and the program for pieces of them."""
    params, gradients = arrays(0), arrays(1)
    state = tx.init(params)
    for seed in (2, 3):  # moments that are not zero
        _, state = tx.update(arrays(seed), state, params)

    def update(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    args = jax.tree.map(jnp.asarray, (gradients, state, params))
    splits = list(map(split_of, jax.tree.leaves(args)))
    return update, args, splits, on_pieces(update, args, splits, DEVICES)


def on_devices(program, args, splits):
    """Runs a program on four devices, and returns its result as whole arrays."""

    def local(*leaves):
        stages = stages_of(program, DEVICES)
        value, _ = run(stages, program.run(0, list(leaves)), {})
        return jax.tree.leaves(program.result(value))

    mapped = jax.shard_map(
        local,
        mesh=pj.data_mesh(4),
        in_specs=tuple(map(spec_of, splits)),
        out_specs=list(map(spec_of, program.splits)),
        check_vma=False,
    )
    return jax.tree.unflatten(program.tree, jax.jit(mapped)(*jax.tree.leaves(args)))


ELEMENTWISE = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "multi steps": optax.MultiSteps(optax.adamw(1e-3), 3),
    "schedule": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1, 0, 9)),
    "partition": optax.partition(
        {"a": optax.adamw(1e-3), "b": optax.sgd(0.1)},
        {"first": "a", "second": "b", "whole": "a"},
    ),
    "mask": optax.masked(
        optax.adamw(1e-3), {"first": True, "second": False, "whole": True}
    ),
    "noise": optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "schedule free": contrib.schedule_free_adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=128),
}
WITH_SUMS = {
    "clip": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)), [3]),
    "if finite": (optax.apply_if_finite(optax.adam(1e-3), 3), [2]),
    "lamb": (optax.lamb(1e-3), [4, 4]),
}
REFUSED = {
    "muon": (contrib.muon(1e-3), "reshape"),
    "factored": (
        optax.adafactor(1e-3, min_dim_size_to_factor=2),
        "reduce_sum along some axes of a split array",
    ),
    "sm3": (optax.sm3(1e-3), "reduce_max"),
    "novograd": (optax.novograd(1e-3), "a sum inside a cond"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_updates_have_the_same_bits(name):
    update, args, splits, program = planned(ELEMENTWISE[name])
    found = on_devices(program, args, splits)
    assert_close(found, jax.jit(update)(*args), rounding=1e-6)


def test_an_update_without_sums_has_one_level():
    _, _, _, program = planned(ELEMENTWISE["adamw"])
    assert len(program.levels) == 1


@pytest.mark.parametrize("name", WITH_SUMS)
def test_sums_over_whole_arrays_are_added_over_devices(name):
    tx, most = WITH_SUMS[name]
    update, args, splits, program = planned(tx)
    assert len(program.levels) == len(most) + 1
    assert all(program.sums(i) <= count + 2 for i, count in enumerate(most))
    found = on_devices(program, args, splits)
    assert_close(found, jax.jit(update)(*args), rounding=1e-6)


def assert_close(found, wanted, rounding):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=rounding, atol=1e-7)
        else:
            assert_bits_equal(_raw(a), _raw(b))


def _raw(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


@pytest.mark.parametrize("name", REFUSED)
def test_an_update_that_needs_more_names_the_operation(name):
    tx, operation = REFUSED[name]
    with pytest.raises(NotElementwiseError, match=f"^{operation}$"):
        planned(tx)

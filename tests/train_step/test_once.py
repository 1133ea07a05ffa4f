"""Tests checks that a train step makes in its first step alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..groups import mesh_of


def loss_fn(params, batch, *, shared=None):
    moved = params if shared is None else params + shared["bias"]
    return jnp.mean((batch @ moved) ** 2)


def shards(mesh, *, same):
    """Makes an array that each group splits, and that groups have in common or not."""
    sharding = NamedSharding(mesh, P("fsdp"))
    groups = {device: float(place[0]) for place, device in np.ndenumerate(mesh.devices)}
    parts = [
        jax.device_put(np.full(2, 0.0 if same else groups[device]), device)
        for device in sharding.addressable_devices_indices_map((4,))
    ]
    return jax.make_array_from_single_device_arrays((4,), sharding, parts)


def make(mesh):
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host")
    return train, train.init(
        jax.device_put(jnp.ones(4), NamedSharding(mesh, P("fsdp")))
    )


def test_differing_input_of_groups_is_refused_in_the_first_step():
    mesh = mesh_of(2, "fsdp")
    batch, equal = np.ones((4, 4), np.float32), {"bias": shards(mesh, same=True)}
    other = {"bias": shards(mesh, same=False)}
    train, state = make(mesh)
    state, _ = train.step(state, batch, shared=equal)
    train.step(state, batch, shared=other)  # not compared again
    train, state = make(mesh)
    with pytest.raises(
        ValueError, match=r"`shared\['bias'\]` must be the same in ever"
    ):
        train.step(state, batch, shared=other)
    # It is compared until it has been found to be the same.
    with pytest.raises(
        ValueError, match=r"`shared\['bias'\]` must be the same in ever"
    ):
        train.step(state, batch, shared=other)


def test_step_without_input_leaves_the_comparison_to_the_next():
    mesh = mesh_of(2, "fsdp")
    train, state = make(mesh)
    batch = np.ones((4, 4), np.float32)
    state, _ = train.step(state, batch)
    with pytest.raises(ValueError, match="must be the same in every"):
        train.step(state, batch, shared={"bias": shards(mesh, same=False)})

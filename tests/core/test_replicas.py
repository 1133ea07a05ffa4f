"""Tests that the digest distinguishes equal replicas from unequal ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..helpers import batches, init_params, loss_fn, with_trainable

DEVICES = 4


def replicate(tree):
    return jax.device_put(tree, NamedSharding(pj.data_mesh(DEVICES), P()))


def tampered(array, device, change):
    """Returns an array that claims to be replicated, but differs on one device."""
    shards = [
        jax.device_put(change(np.array(s.data)), s.device)
        if s.device.id == device
        else s.data
        for s in array.addressable_shards
    ]
    out = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    assert out.is_fully_replicated
    return out


def flip_one_bit(value):
    value.view(np.uint32)[0, 0] ^= 1
    return value


def test_equal_replicas_have_equal_digests():
    digests = pj.replica_digest(replicate(init_params()))
    assert list(digests) == list(range(DEVICES))
    assert len(set(digests.values())) == 1
    assert all(len(digest) == 32 for digest in digests.values())


@pytest.mark.parametrize("device", range(DEVICES))
def test_flipped_bit_on_one_device_changes_its_digest(device):
    tree = replicate(init_params())
    digests = pj.replica_digest(
        tree | {"out": tampered(tree["out"], device, flip_one_bit)}
    )
    odd = digests.pop(device)
    assert len(set(digests.values())) == 1
    assert odd not in digests.values()


def test_negative_zero_is_not_zero():
    tree = replicate({"w": np.zeros((2, 2), np.float32)})
    digests = pj.replica_digest({"w": tampered(tree["w"], 1, np.negative)})
    assert len(set(digests.values())) == 2


def test_equal_nans_are_equal():
    tree = replicate({"w": np.full((2, 2), np.nan, np.float32)})
    assert len(set(pj.replica_digest(tree).values())) == 1


@pytest.mark.parametrize(
    "other",
    [
        np.zeros((2, 3), np.float32),  # a value
        np.ones((3, 2), np.float32),  # a shape
        np.ones((2, 3), np.int32),  # a dtype, with other bits
        np.full((2, 3), 1.0, np.float32).view(np.int32),  # a dtype, with the same bits
    ],
)
def test_digest_depends_on_shape_dtype_and_values(other):
    def digest(value):
        return pj.replica_digest(replicate({"w": value}))[0]

    assert digest(np.ones((2, 3), np.float32)) == digest(np.ones((2, 3), np.float32))
    assert digest(other) != digest(np.ones((2, 3), np.float32))


def test_digest_of_a_state_leaves_out_gradients_in_flight():
    """Gradients in flight differ between devices by design, and are left out."""
    train = pj.make_train_step(
        loss_fn, optax.adam(1e-2), mesh=pj.data_mesh(DEVICES), warmup_steps=1
    )
    state = train.init(init_params(), rng=None)
    for batch in batches(3):
        state, _ = train.step(state, batch)
    rows = np.asarray(state.in_flight.pending[0].gradients["out"])
    rows = rows.reshape(DEVICES, -1)
    assert (rows[0] != rows[1]).any()
    digests = pj.replica_digest(state)
    assert len(digests) == DEVICES
    assert len(set(digests.values())) == 1
    alone = pj.replica_digest(state._replace(in_flight=None, calls=None))
    assert len(set(alone.values())) == 1

    shards = tampered(state.params["out"], 2, flip_one_bit)
    worse = with_trainable(state, params=state.params | {"out": shards})
    assert len(set(pj.replica_digest(worse).values())) == 2


def test_typed_keys_are_part_of_the_digest():
    keys = {
        "key": replicate(jax.random.key(0)),
        "raw": replicate(jax.random.PRNGKey(0)),
    }
    digests = pj.replica_digest(keys)
    assert len(set(digests.values())) == 1
    others = keys | {"key": replicate(jax.random.key(1))}
    assert pj.replica_digest(others)[0] != digests[0]


def test_key_stays_equal_on_all_devices_after_a_step():
    def loss(params, batch, *, rng):
        return loss_fn(params, batch) * jax.random.uniform(rng)

    train = pj.make_train_step(loss, optax.sgd(0.1), mesh=pj.data_mesh(DEVICES))
    state = train.init(init_params(), rng=jax.random.key(0))
    before = pj.replica_digest(state.rng)
    state, _ = train.step(state, batches(1)[0])
    after = pj.replica_digest(state.rng)
    assert len(set(after.values())) == 1
    assert set(after.values()).isdisjoint(before.values())


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"w": np.ones(3)},
        jax.device_put(
            jnp.ones(DEVICES), NamedSharding(pj.data_mesh(DEVICES), P("data"))
        ),
    ],
    ids=["nothing", "host", "sharded"],
)
def test_tree_without_replicated_arrays_is_refused(tree):
    message = (
        r"`tree` must hold at least one replicated jax.Array; got none, so nothing"
        r" would be checked. Pass the state or its parameters"
    )
    with pytest.raises(ValueError, match=message):
        pj.replica_digest(tree)


@pytest.mark.parametrize("device", [0, 3])
def test_shards_are_compared_between_groups(device):
    """Devices at the same place in their groups hold the same shards."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    w = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("fsdp")))
    digests = pj.replica_digest({"w": w})
    assert digests[0] == digests[2] != digests[1] == digests[3]
    shards = [x.data + (x.device.id == device) for x in w.addressable_shards]
    odd = jax.make_array_from_single_device_arrays(w.shape, w.sharding, shards)
    changed = pj.replica_digest({"w": odd})
    assert [changed[i] != digests[i] for i in range(4)] == [
        i == device for i in range(4)
    ]


def test_residuals_of_compress_are_left_out():
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    own = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("host")))
    whole = jax.device_put(jnp.zeros(2), NamedSharding(mesh, P()))
    state = {"codec": pj.transforms.CompressState(own), "w": whole}
    assert len(set(pj.replica_digest(state).values())) == 1

"""Tests that each process passes its own part of a batch."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..helpers import assert_bits_equal, init_params, loss_fn
from .refusals import BATCH, make, refused


@pytest.mark.parametrize(
    "part",
    [
        {"x": np.ones((3, 2))},
        {"x": np.ones(4), "y": np.ones(2)},
        np.ones(()),
        np.ones((0, 2)),
        {},
    ],
)
def test_indivisible_part_of_a_batch_is_refused(part):
    with refused("`local` must hold arrays with one common .* of its 2 shares"):
        make().batch(part)


@pytest.mark.parametrize("own", [-1, 2.0, None])
def test_number_of_batches_must_be_an_integer(own):
    with refused("`own` must be an integer of at least 0, got"):
        make().fewest_batches(own)


def test_batch_on_one_process_is_unchanged():
    train = make()
    assert_bits_equal(train.batch(BATCH), BATCH)
    assert train.fewest_batches(3) == 3


def test_devices_with_the_same_data_share_a_part_of_the_batch():
    """On a mesh with a second axis, four devices have two shares."""
    mesh = pj.data_mesh(4, axis_name=("data", "model"), hosts=2)
    part = np.arange(6.0)
    made = make(mesh=mesh).batch(part)
    np.testing.assert_array_equal(made, part)
    shares = {tuple(np.asarray(x.data)) for x in made.addressable_shards}
    assert shares == {(0, 1, 2), (3, 4, 5)}


MAPPINGS = {
    "a tokenizer's": collections.UserDict,
    "read-only": types.MappingProxyType,
    "a chain": collections.ChainMap,
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_mappings_of_any_kind_are_batches(kind):
    """JAX takes such a mapping for a leaf, whose length is its number of keys."""
    of, train = MAPPINGS[kind], make()
    nested = of({"x": BATCH["x"], "more": of({"y": BATCH["y"]})})

    def loss(params, batch):
        assert type(batch) is type(batch["more"]) is dict
        return loss_fn(params, {"x": batch["x"], "y": batch["more"]["y"]})

    assert_bits_equal(train.batch(nested), {"x": BATCH["x"], "more": {"y": BATCH["y"]}})
    own = make(loss)
    state, wanted = own.init(init_params(), batch=nested), train.init(init_params())
    assert own.transfers(state, nested) == train.transfers(wanted, BATCH)
    for _ in range(2):
        state, _ = own.step(state, nested)
        wanted, _ = train.step(wanted, BATCH)
    assert_bits_equal(state.params, wanted.params)


def test_registered_mapping_keeps_its_type():
    batch = collections.OrderedDict(x=BATCH["x"], y=BATCH["y"])
    assert type(make().batch(batch)) is collections.OrderedDict


def aligned(shape):
    """Returns an array whose memory JAX would share on a CPU."""
    raw = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


@pytest.mark.parametrize("devices", [1, 2])
def test_batch_shares_no_memory_with_the_input(devices):
    buffer = aligned((16, 64))
    buffer[:] = 1
    train = make(devices=devices)
    batch = train.batch({"x": buffer, "flat": buffer.reshape(-1)[:16]})
    buffer[:] = 2
    assert_bits_equal(batch["x"], np.ones((16, 64), np.float32))
    assert_bits_equal(batch["flat"], np.ones(16, np.float32))


@pytest.mark.parametrize("sharded", [False, True])
def test_state_shares_no_memory_with_the_input(sharded):
    """Neither does the first state share the caller's arrays, nor does it wait."""
    params, model_state = aligned((64, 64)), aligned((64, 64))
    params[:] = model_state[:] = 1

    def loss(params, batch, *, model_state):
        return params["w"].mean() * batch.mean(), pj.Aux(model_state=model_state)

    train = make(loss, devices=2, shard_optimizer=sharded)
    batch = np.ones(2, np.float32)
    state = train.init({"w": params}, model_state=model_state, batch=batch)
    params[:] = model_state[:] = 2
    for leaf in (state.params["w"], state.model_state):
        assert_bits_equal(leaf, np.ones((64, 64), np.float32))


def test_step_does_not_write_into_numpy_arrays():
    """A donated state may be one of NumPy arrays."""
    train = make(donate=True)
    state, _ = train.step(train.init(init_params()), BATCH)
    state = jax.tree.map(np.array, jax.device_get(state))
    before = jax.tree.map(np.array, state)
    for _ in range(2):
        jax.block_until_ready(train.step(state, BATCH))
    assert_bits_equal(state, before)


def test_keys_of_the_examples_are_kept():
    keys = jax.random.split(jax.random.key(0), 16)
    found = make().batch({"keys": keys})["keys"]
    assert found.dtype == keys.dtype
    assert_bits_equal(*map(jax.random.key_data, (found, keys)))


@pytest.mark.parametrize("axes", [("data",), ("host", "fsdp")])
def test_step_reads_no_array_after_its_call(axes):
    mesh = pj.data_mesh(4, axis_name=axes, hosts=2 if len(axes) > 1 else None)
    train = pj.make_train_step(
        lambda w, batch: w @ batch.mean(0),
        optax.sgd(1.0),
        mesh=mesh,
        axis_name=axes[0],
        width=1,
    )
    spec = P(axes[1]) if len(axes) > 1 else P()
    zeros = jax.device_put(jnp.zeros(512), NamedSharding(mesh, spec))
    state, buffer = train.init(zeros), aligned((64, 512))
    for number in range(1, 4):
        buffer[:] = number
        state, _ = train.step(state, buffer)
    buffer[:] = 100
    np.testing.assert_array_equal(state.params, np.full(512, -6.0))

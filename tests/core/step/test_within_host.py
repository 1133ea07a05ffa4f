"""Tests that devices of a host predict by their mean, as one device would."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import pipejax as pj

from ...grid import grid
from ...helpers import OPTIMIZERS, batches, init_params, loss_fn

HOSTS = ("host", "device")


def weighted(params, batch):
    """Weighs each example by its first feature."""
    weights = jnp.abs(batch["x"][:, 0])
    losses = jax.vmap(lambda x, y: loss_fn(params, {"x": x[None], "y": y[None]}))
    total = weights.sum()
    return weights @ losses(batch["x"], batch["y"]) / total, pj.Aux(weight=total)


def trained(mesh, tx, loss=loss_fn, steps=7, **settings):
    train = pj.make_train_step(loss, tx, mesh=mesh, **settings)
    data, losses = batches(steps), []
    state = train.init(init_params(), batch=data[0])
    for batch in data:
        state, info = train.step(state, batch)
        losses.append(float(info.loss))
    state, infos = train.drain(state)
    return jax.device_get(train.whole_params(state)), [*losses, *map(float_of, infos)]


def float_of(info):
    return float(info.loss)


def both(tx, axis_name=HOSTS, **settings):
    """Returns the results of two hosts with two devices, and of two devices."""
    hosts = pj.data_mesh(4, axis_name=HOSTS, hosts=2)
    two = trained(pj.data_mesh(2), tx, **settings)
    return trained(hosts, tx, axis_name=axis_name, **settings), two


@grid(
    1,
    executor=["fused", "host"],
    tx=["clip+adamw", "momentum"],
    settings=[
        {},
        {"width": 3},
        {"weight_prediction": "own"},
        {"microbatches": 2},
        {"delayed": {"hidden": True, "bias": False, "out": True}},
        {"warmup_steps": 2},
    ],
)
def test_two_devices_of_a_host_train_as_one(executor, tx, settings):
    found, wanted = both(OPTIMIZERS[tx], executor=executor, **settings)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_sharded_optimizer_predicts_by_the_mean_of_a_host(executor):
    settings = {"shard_optimizer": True, "executor": executor}
    found, wanted = both(OPTIMIZERS["clip+adamw"], **settings)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=3e-6)


def test_hierarchical_exchange_sums_means_of_hosts():
    settings = {"all_reduce": pj.collectives.hierarchical()}
    hosts = pj.data_mesh(4, axis_name=HOSTS, hosts=2)
    tx = OPTIMIZERS["clip+adamw"]
    found = trained(hosts, tx, axis_name=HOSTS, **settings)
    wanted = trained(pj.data_mesh(2), tx)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=3e-6)


def test_weighted_means_of_a_host_keep_their_weights():
    found, wanted = both(OPTIMIZERS["momentum"], loss=weighted)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"width": 1},
        {"weight_prediction": False},
        {"at_once": pj.codecs.power_sgd(1, jax.random.key(0))},
        {"axis_name": HOSTS[::-1]},  # the second axis has no devices of one host
    ],
)
def test_devices_keep_their_own_gradients_without_a_prediction_by_host(settings):
    hosts = pj.data_mesh(4, axis_name=HOSTS, hosts=2)

    def kinds(mesh, **settings):
        train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, **settings)
        state = train.abstract_state(init_params())
        found = train.transfers(state, batches(1)[0])
        return [(x.kind, x.devices, x.bytes) for x in found]

    alone = kinds(pj.data_mesh(4), **(settings | {"axis_name": "data"}))
    assert kinds(hosts, **({"axis_name": HOSTS} | settings)) == alone


@pytest.mark.parametrize("executor", ["fused", "host"])
def test_devices_of_a_host_have_one_message(executor):
    hosts = pj.data_mesh(4, axis_name=HOSTS, hosts=2)
    given = {"axis_name": HOSTS, "executor": executor, "width": 3}
    train = pj.make_train_step(loss_fn, optax.adamw(0.1), mesh=hosts, **given)
    state = train.init(init_params())
    for batch in batches(3):
        state, _ = train.step(state, batch)
    params = jax.tree.leaves(state.params)
    for message in state.in_flight.pending:
        for leaf, like in zip(jax.tree.leaves(message.gradients), params, strict=True):
            assert leaf.size == 2 * like.size
            first, second = np.split(np.asarray(leaf), 2)
            assert (first != second).any()
            own = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            chex.assert_trees_all_equal(own, [first, first, second, second])


def test_copied_message_of_a_host_counts_for_all_its_devices():
    """The host executor copies it from one device, as from a GPU."""

    def ended(executor):
        hosts = pj.data_mesh(4, axis_name=HOSTS, hosts=2)
        settings = {"axis_name": HOSTS, "executor": executor}
        train = pj.make_train_step(weighted, optax.adamw(0.1), mesh=hosts, **settings)
        if executor == "host":
            beside = Mesh(np.array(jax.devices()[7:]).reshape(1, 1), HOSTS)
            train.executor.__dict__["reduction_mesh"] = beside  # a cached property
        data, infos = batches(4), []
        state = train.init(init_params(), batch=data[0])
        for batch in data:
            state, info = train.step(state, batch)
            infos.append(info)
        return jax.device_get((state.params, infos))

    chex.assert_trees_all_close(ended("host"), ended("fused"), rtol=1e-5, atol=3e-6)


def test_transfers_list_the_mean_within_hosts_first():
    hosts = pj.data_mesh(4, axis_name=HOSTS, hosts=2)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=hosts, axis_name=HOSTS)
    state = train.abstract_state(init_params())
    within, *between = train.transfers(state, batches(1)[0])
    assert (within.kind, within.devices) == ("all-reduce", 2)
    assert {x.devices for x in between} >= {4}
    size = sum(np.size(x) for x in jax.tree.leaves(init_params()))
    assert sum(x.bytes for x in (within, *between) if x.devices == 2) >= 4 * size


@pytest.mark.parametrize("shard_optimizer", [True, False])
def test_devices_of_a_single_host_have_nothing_to_average_first(shard_optimizer):
    """Otherwise the whole exchange would come before the prediction, not hidden."""
    train = pj.make_train_step(
        loss_fn,
        optax.adamw(0.1),
        mesh=pj.data_mesh(4, axis_name=HOSTS, hosts=1),
        axis_name=HOSTS,
        shard_optimizer=shard_optimizer,
    )
    assert train.settings.device_axis is None

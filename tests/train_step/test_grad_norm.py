"""Tests the norm of the mean gradient that a step reports."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..grid import grid
from ..helpers import batches, init_params, loss_fn

FULL = pytest.mark.full
DTYPES = {"float32": None, "float16": jnp.float16, "bfloat16": jnp.bfloat16}


@jax.jit
def by_hand(params, batch):
    return optax.tree.norm(jax.grad(loss_fn)(params, batch))


def even_params():
    """Returns parameters that divide among devices and groups."""
    params = init_params()
    params["hidden"] = np.tile(params["hidden"], 2)[:, :8]
    params["out"] = np.tile(params["out"], (2, 2))[:8, :4]
    return params | {"bias": np.zeros(8, np.float32)}


def wide(batch):
    return {"x": batch["x"], "y": np.tile(batch["y"], 2)[:, :4]}


def placed(mesh):
    """Splits one array over the devices of a group, and leaves others whole."""
    params = even_params()
    split = NamedSharding(mesh, P(None, "fsdp"))
    return params | {"hidden": jax.device_put(params["hidden"], split)}


@grid(
    1,
    executor=["fused", "host"],
    groups=[False, True],
    sharded=[False, True],
    dtype=DTYPES,
    microbatches=[1, 2],
)
def test_norm_equals_the_norm_of_the_mean_gradient(
    executor, groups, sharded, dtype, microbatches
):
    """Shards of groups and pieces of devices add up their squares."""
    mesh, axis, params = pj.data_mesh(4), "data", even_params()
    if groups:
        axis, types = "host", (AxisType.Auto,) * 2
        devices = jax.devices()[:4]
        mesh = jax.make_mesh(
            (2, 2), ("host", "fsdp"), axis_types=types, devices=devices
        )
        params = placed(mesh)
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.1),
        mesh=mesh,
        axis_name=axis,
        executor=executor,
        shard_optimizer=sharded,
        reduce_dtype=DTYPES[dtype],
        microbatches=microbatches,
    )
    first, second = map(wide, batches(2))
    state, info = train.step(train.init(params), first)
    assert np.isnan(info.grad_norm)
    _, info = train.step(state, second)
    wanted = by_hand(even_params(), first)
    precise = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(info.grad_norm, wanted, rtol=precise)


@pytest.mark.parametrize("sharded", [False, True])
def test_norm_is_weighted_as_the_gradient(sharded):
    def loss(params, batch):
        return loss_fn(params, batch), pj.Aux(weight=batch["w"][0])

    (batch,) = map(wide, batches(1))
    weights, params = np.float32([1, 3, 0, 7]), even_params()
    train = pj.make_train_step(
        loss,
        optax.sgd(0.1),
        mesh=pj.data_mesh(4),
        width=1,
        shard_optimizer=sharded,
    )
    batch = batch | {"w": weights.repeat(len(batch["x"]) // 4)}
    _, info = train.step(train.init(params, batch=batch), batch)
    shares = [{k: np.split(batch[k], 4)[i] for k in ("x", "y")} for i in range(4)]
    gradients = [jax.grad(loss_fn)(params, share) for share in shares]
    mean = jax.tree.map(
        lambda *g: np.average(np.stack(g), axis=0, weights=weights), *gradients
    )
    np.testing.assert_allclose(info.grad_norm, optax.tree.norm(mean), rtol=1e-5)


def test_skipped_gradient_has_no_finite_norm():
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=pj.data_mesh(4), width=1)
    (batch,) = batches(1)
    batch["x"][3, 1] = np.nan
    _, info = train.step(train.init(init_params()), batch)
    assert int(info.skipped) == 1
    assert np.isnan(info.grad_norm)


def test_drained_gradients_have_norms():
    train = pj.make_train_step(loss_fn, optax.sgd(0.0), mesh=pj.data_mesh(4), width=3)
    data, state = batches(2), train.init(init_params())
    for batch in data:
        state, _ = train.step(state, batch)
    _, infos = train.drain(state)
    wanted = [by_hand(init_params(), batch) for batch in data]
    np.testing.assert_allclose([x.grad_norm for x in infos], wanted, rtol=1e-5)
    mean = pj.mean_info(infos)
    np.testing.assert_allclose(mean.grad_norm, np.mean(wanted), rtol=1e-5)


def test_norm_leaves_out_a_part_of_a_gradient_with_nan():
    """The optimizer is given the rest of the batch before, and then what is fresh."""
    train = pj.make_train_step(
        loss_fn,
        optax.sgd(0.0),
        mesh=pj.data_mesh(4),
        at_once=pj.codecs.power_sgd(1, jax.random.key(0)),
    )
    (good,) = batches(1)
    bad = jax.tree.map(lambda x: x * np.nan, good)
    state, norms, applied = train.init(init_params()), [], []
    for batch in (good, good, bad, bad, bad):
        state, info = train.step(state, batch)
        norms.append(float(info.grad_norm))
        applied.append(bool(info.applied))
    assert applied == [True, True, True, False, False]
    assert np.isnan(norms).tolist() == [True, False, False, True, True]
    assert 0 < norms[2] < norms[1]

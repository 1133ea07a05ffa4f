"""Tests that the form to restore must be that of a state of the train step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint

from .helpers import entries

PARAMS = {"w": jnp.ones((8, 4))}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


@functools.cache
def made(tx="adam", devices=4, inner=None, **options):
    """Returns a train step and the shapes of its state."""
    mesh, axis_name, params = pj.data_mesh(devices), "data", PARAMS
    if inner is not None:
        mesh = pj.data_mesh(devices * inner, axis_name=("host", "fsdp"), hosts=devices)
        axis_name = "host"
        params = jax.device_put(PARAMS, NamedSharding(mesh, P("fsdp")))
    train = pj.make_train_step(
        loss_fn, getattr(optax, tx)(0.1), mesh=mesh, axis_name=axis_name, **options
    )
    return train, train.abstract_state(params)


def started(devices=4, **options):
    train, _ = made(devices=devices, **options)
    return train.step(train.init(PARAMS), np.ones((8, 8), np.float32))[0]


OTHERS = {
    "width 2; got width 3": (made, {"width": 3}),
    "devices 4; got devices 2": (made, {"devices": 2}),
    r"inner axes \(\); got inner axes \('fsdp',\)": (made, {"inner": 2}),
    "shard_optimizer False; got shard_optimizer True": (
        made,
        {"shard_optimizer": True},
    ),
}


@pytest.mark.parametrize("says", OTHERS)
def test_template_from_another_train_step_is_refused(manager, says):
    """The folder is left as it is: nothing in it is at fault."""
    make, options = OTHERS[says]
    checkpoint.save(manager, started())
    (train, _), (_, like) = made(), make(**options)
    rule = rf"`like` must be a state of `train`, with {says}\. Pass `train.init\("
    with pytest.raises(ValueError, match=rule):
        checkpoint.restore(manager, train, like)
    manager.wait_until_finished()
    assert entries(manager.directory) == ["1"]


def test_function_instead_of_train_step_is_refused(manager):
    _, like = made()
    with pytest.raises(ValueError, match=r"`train` must be the train step .* got fun"):
        checkpoint.restore(manager, loss_fn, like)


PAIRS = [("adam", "sgd"), ("sgd", "adam"), ("lion", "adam")]


@pytest.mark.parametrize("devices", [4, 2])
@pytest.mark.parametrize(("saved", "now"), PAIRS)
def test_train_step_with_another_optimizer_is_refused(manager, saved, now, devices):
    """On other devices, the drain would need the optimizer at once."""
    checkpoint.save(manager, started(tx=saved))
    (train, wanted), (_, like) = made(now, devices), made(saved, devices)
    rule = r"`train` must have the optimizer that `like` and .*`opt_state.*Make the tra"
    with pytest.raises(ValueError, match=rule):
        checkpoint.restore(manager, train, like)
    with pytest.raises(ValueError, match=r"`like` must have the form of .*opt_state"):
        checkpoint.restore(manager, train, wanted)

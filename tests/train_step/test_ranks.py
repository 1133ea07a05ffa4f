"""Tests what is logged of codecs of low rank before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

LARGE = {"w": np.zeros((64, 64), np.float32), "b": np.zeros(64, np.float32)}
SMALL = {"w": np.zeros((8, 8), np.float32), "b": np.zeros(8, np.float32)}


@pytest.mark.parametrize(
    ("params", "rank", "percent"),
    [
        (LARGE, 1, None),  # 128 + 64 of 4,160 elements
        (LARGE, 16, "51"),  # 2,048 + 64
        (LARGE, 32, "100"),
        (SMALL, 4, "100"),
        (SMALL, None, None),
    ],
)
def test_large_share_is_logged(params, rank, percent, caplog):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    codec = None if rank is None else pj.codecs.power_sgd(rank, jax.random.key(0))
    mesh = pj.data_mesh(2)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, at_once=codec)
    train.init(params)
    found = [x.message for x in caplog.records if "`at_once` exchanges" in x.message]
    assert len(found) == (percent is not None)
    assert all(f"exchanges {percent} %" in message for message in found)


@pytest.mark.parametrize(("layers", "said"), [(6, 0), (3, 1), (None, 0)])
@pytest.mark.parametrize("how", ["at_once", "all_reduce"])
def test_layers_without_a_stack_are_logged(how, layers, said, caplog):
    codec = pj.codecs.power_sgd(1, jax.random.key(0), layers=layers)
    psum = pj.collectives.psum(pj.codecs.error_feedback(codec))
    given = {"at_once": codec} if how == "at_once" else {"all_reduce": psum}

    def loss_fn(params, batch):
        return jnp.mean((batch @ params.sum(0)) ** 2)

    mesh = pj.data_mesh(2)
    train = pj.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, **given)
    state = train.init(jnp.ones((6, 32, 32)))
    found = [x for x in caplog.records if "All layers share its rank" in x.message]
    assert len(found) == said
    train.step(state, np.ones((4, 32), np.float32))


def test_shards_of_a_device_count(caplog):
    """A group of two devices shards six layers."""
    mesh = pj.data_mesh(4, axis_name=("host", "fsdp"), hosts=2)
    params = jax.device_put(jnp.ones((6, 32, 32)), NamedSharding(mesh, P("fsdp")))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params.sum(0)) ** 2)

    for layers in (6, 3):
        codec = pj.codecs.power_sgd(1, jax.random.key(0), layers=layers)
        pj.make_train_step(
            loss_fn, optax.sgd(0.1), mesh=mesh, axis_name="host", at_once=codec
        ).init(params)
    found = [x for x in caplog.records if "All layers share its rank" in x.message]
    assert [x.args[0] for x in found] == [6]

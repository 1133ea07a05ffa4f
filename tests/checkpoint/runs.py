"""Runs of train steps whose states move to other devices."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import codecs, collectives
from pipejax.checkpoint._reshard import reshard
from pipejax.checkpoint._spread import Spread

KEY = jax.random.key(0)
SIGN = codecs.error_feedback(codecs.sign(8))
ALL_REDUCES = {
    "two_shot": collectives.two_shot(SIGN),
    "psum, power_sgd": collectives.psum(
        codecs.error_feedback(codecs.power_sgd(1, KEY))
    ),
    "ring, stochastic": collectives.ring(
        codecs.error_feedback(codecs.stochastic(codecs.int4(8), KEY))
    ),
    "hierarchical": collectives.hierarchical(outer=collectives.two_shot(SIGN)),
}


RATE = 0.5


def linear(params, batch):
    """Returns a loss whose gradient depends on the batch, but not on the parameters."""
    product = jnp.einsum("bi,ij,bj->b", batch["x"], params["w"], batch["y"])
    half = batch["y"] * params["half"][None, :].astype(jnp.float32)
    return jnp.mean(product + half.sum(1))


def params():
    return {"w": jnp.zeros((5, 3)), "half": jnp.zeros(3, jnp.bfloat16)}


@functools.cache
def train_step(all_reduce, devices, hosts=None, width=1):
    axis_name = "data" if hosts is None else ("host", "device")
    return pj.make_train_step(
        linear,
        optax.sgd(RATE),
        mesh=pj.data_mesh(devices, axis_name=axis_name, hosts=hosts),
        axis_name=axis_name,
        all_reduce=all_reduce,
        width=width,
    )


def run(train, state, data):
    for batch in data:
        state, _ = train.step(state, batch)
    return state


def moved(train, state):
    """Returns a state on the devices of `train`, as a checkpoint restores it."""
    everywhere = NamedSharding(train.mesh, P())
    known = jax.device_put(state._replace(in_flight={}), everywhere)
    in_flight = jax.device_put(state.in_flight._replace(codec_states={}), everywhere)
    return reshard(train, known._replace(in_flight=in_flight), Spread.of(state))


@functools.cache
def weighted(devices, hosts=None):
    """Makes a train step whose examples have more weight on later devices."""

    def loss(params, batch):
        weight = batch["n"].sum()
        each = (batch["x"] @ params) * batch["n"]
        return each.sum() / weight, pj.Aux(weight=weight)

    axis_name = "data" if hosts is None else ("host", "device")
    mesh = pj.data_mesh(devices, axis_name=axis_name, hosts=hosts)
    return pj.make_train_step(loss, optax.sgd(RATE), mesh=mesh, axis_name=axis_name)

"""Provides a user's Flax loop with a pipelined optimizer, and its expected result."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ..helpers import batches, trajectory

DEVICES, STEPS = 4, 6


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(jnp.tanh(nn.Dense(7)(x)))


NET = Net()


def init_params():
    params = NET.init(jax.random.key(0), jnp.ones((1, 5)))["params"]
    return jax.tree.map(np.asarray, params)


def loss_fn(params, batch):
    return jnp.mean((NET.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


class Loop:
    """A Flax loop as users write it, with a pipelined optimizer.

    If `ahead` is given, it is the inner optimizer, and gradients are taken at the
    prediction.
    """

    def __init__(self, tx, *, check_vma=False, ahead=None):
        def create(params):
            return TrainState.create(apply_fn=NET.apply, params=params, tx=tx)

        def step(state, batch):
            params = state.params
            if check_vma:
                params = lax.pcast(params, "data", to="varying")
            if ahead is not None:
                params = pj.predicted_params(ahead, state.opt_state, params)
            return state.apply_gradients(grads=jax.grad(loss_fn)(params, batch))

        def drain(state):
            zeros = jax.tree.map(jnp.zeros_like, state.params)
            if check_vma:
                zeros = lax.pcast(zeros, "data", to="varying")
            return state.apply_gradients(grads=zeros)

        specs = pj.state_specs(jax.eval_shape(create, init_params()))

        def on_mesh(f, in_specs):
            mapped = jax.shard_map(
                f,
                mesh=pj.data_mesh(DEVICES),
                in_specs=in_specs,
                out_specs=specs,
                check_vma=check_vma,
            )
            return jax.jit(mapped)

        self.create = on_mesh(create, P())
        self.step = on_mesh(step, (specs, P("data")))
        self.drain = on_mesh(drain, (specs,))

    def run(self, width, steps=STEPS):
        """Returns the states after every step, and after `width - 1` zero gradients."""
        state, out = self.create(init_params()), []
        for batch in batches(steps):
            state = self.step(state, batch)
            out.append(state)
        for _ in range(width - 1):
            state = self.drain(state)
        return [*out, state]


@functools.cache
def expected(width, tx=optax.sgd(0.1), weight_prediction=False):  # noqa: B008
    """Returns the parameters of `make_train_step` after every step and the drain."""
    train = pj.make_train_step(
        loss_fn,
        tx,
        mesh=pj.data_mesh(DEVICES),
        width=width,
        weight_prediction=weight_prediction,
    )
    return trajectory(train, init_params(), batches(STEPS))


def assert_close(got, wanted):
    # Two programs may contract the multiplications of Adam or momentum with additions
    # in different places. The bound is derived in train_step/test_step.py.
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    bound = 4 * STEPS * np.finfo(np.float32).eps / 2 * largest
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=bound)


def chained(width, tx):
    return optax.chain(pj.pipelined_mean("data", width=width), tx)

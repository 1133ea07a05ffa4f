"""Provides the shapes, and the step that most programs take."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# ROWS counts the rows of one device.
WIDTH, ROWS, LAYERS = 64, 8, 3
BOTH = ("host", "device")


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def sharded(mesh, specs, shapes):
    return jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        specs,
        shapes,
        is_leaf=lambda x: isinstance(x, P),
    )


def sgd_step(loss_fn):
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def trained(loss_fn, mesh, specs, params, rows, batch):
    """Takes a step by `jax.jit`, with shardings of parameters and rows of the batch."""
    place = functools.partial(NamedSharding, mesh)
    out = jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))
    jitted = jax.jit(sgd_step(loss_fn), out_shardings=(place(P()), out))
    return jitted, sharded(mesh, specs, params), sharded(mesh, P(rows), batch)


def experts_of(count):
    """Returns specs and shapes of experts behind a gate, spread over `device`."""
    specs = {"gate": P(), "up": P("device"), "down": P("device")}
    shapes = {
        "gate": float32(WIDTH, count),
        "up": float32(count, WIDTH, 2 * WIDTH),
        "down": float32(count, 2 * WIDTH, WIDTH),
    }
    return specs, shapes

"""Provides layouts that `jax.jit` spreads over a mesh by shardings alone."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .shapes import (
    BOTH,
    LAYERS,
    ROWS,
    WIDTH,
    experts_of,
    float32,
    sgd_step,
    sharded,
    trained,
)


def layer(x, w):
    return jax.nn.relu(x @ w)


def mlp(params, x):
    for w in params:
        x = layer(x, w)
    return jnp.mean(x**2)


def mlp_remat(params, x):
    for w in params:
        x = jax.checkpoint(layer)(x, w)
    return jnp.mean(x**2)


def fsdp(mesh, loss_fn=mlp, weights=("device",), rows=BOTH):
    """Spreads rows of weights along the first of `weights`, and columns the second."""
    specs, params = [P(*weights)] * LAYERS, [float32(WIDTH, WIDTH)] * LAYERS
    batch = float32(ROWS * mesh.size, WIDTH)
    return trained(loss_fn, mesh, specs, params, rows, batch)


def fsdp_scanned(mesh, remat=False):
    one = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def loss_fn(params, x):
        return jnp.mean(lax.scan(lambda x, w: (one(x, w), None), x, params)[0] ** 2)

    params = float32(LAYERS, WIDTH, WIDTH)
    batch = float32(ROWS * mesh.size, WIDTH)
    return trained(loss_fn, mesh, P(None, "device"), params, BOTH, batch)


def resharded(mesh):
    """Moves rows from devices in the mesh's order to devices in another order."""
    out = NamedSharding(mesh, P(("device", "host")))
    rows = sharded(mesh, P(BOTH), float32(ROWS * mesh.size, WIDTH))
    return jax.jit(lambda x: x * 2, out_shardings=out), rows


MEGATRON = (
    [(P(None, "device"), P("device"))] * 2,
    [(float32(WIDTH, 4 * WIDTH), float32(4 * WIDTH, WIDTH))] * 2,
)


def tensor_parallel(mesh):
    def loss_fn(params, x):
        for up, down in params:
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(x**2)

    batch = float32(ROWS * mesh.size, WIDTH)
    return trained(loss_fn, mesh, *MEGATRON, ("host",), batch)


def tensor_parallel_explicit(mesh):
    """Does the same as `tensor_parallel`, with shardings in the types."""
    mesh = Mesh(mesh.devices, BOTH, axis_types=(AxisType.Explicit,) * 2)
    rows, wide = (NamedSharding(mesh, P("host", x)) for x in (None, "device"))

    def loss_fn(params, x):
        for up, down in params:
            hidden = jax.nn.gelu(jnp.einsum("bd,df->bf", x, up, out_sharding=wide))
            x = x + jnp.einsum("bf,fd->bd", hidden, down, out_sharding=rows)
        return jnp.mean(x**2)

    batch = sharded(mesh, P("host"), float32(ROWS * mesh.size, WIDTH))
    return jax.jit(sgd_step(loss_fn)), sharded(mesh, *MEGATRON), batch


def expert_parallel(mesh):
    """Computes a switch layer by einsum: experts along `device`, tokens along both."""
    experts = mesh.shape["device"]
    by_token = NamedSharding(mesh, P(None, BOTH))
    by_expert = NamedSharding(mesh, P("device", "host"))
    place = lax.with_sharding_constraint

    def loss_fn(params, x):
        gates = jax.nn.softmax(x @ params["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        sent = place(jnp.einsum("gte,gtd->egtd", chosen, x), by_token)
        sent = place(sent, by_expert)
        hidden = jax.nn.relu(jnp.einsum("egtd,edf->egtf", sent, params["up"]))
        back = jnp.einsum("egtf,efd->egtd", hidden, params["down"])
        back = place(place(back, by_expert), by_token)
        return jnp.mean(jnp.einsum("egtd,gte->gtd", back, chosen * gates) ** 2)

    batch = float32(mesh.size, 2 * ROWS, WIDTH)
    return trained(loss_fn, mesh, *experts_of(experts), BOTH, batch)

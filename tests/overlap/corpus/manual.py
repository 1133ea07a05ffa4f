"""Provides programs that write their collectives by hand, in `shard_map` or `pmap`."""

import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .shapes import BOTH, ROWS, WIDTH, experts_of, float32, int32

HERE = P()


def mapped_over(mesh, local, in_specs=HERE, out_specs=HERE):
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    )


def shifted(n):
    return [(i, (i + 1) % n) for i in range(n)]


def expert_parallel(mesh):
    """Computes a switch layer with its all-to-alls."""
    experts = mesh.shape["device"]

    def local(params, x):
        def loss_fn(params):
            gates = jax.nn.softmax(x @ params["gate"])
            chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
            sent = jnp.einsum("te,td->etd", chosen, x)
            sent = lax.all_to_all(sent, "device", 0, 0, tiled=True)
            hidden = jax.nn.relu(sent.reshape(-1, WIDTH) @ params["up"][0])
            back = (hidden @ params["down"][0]).reshape(experts, -1, WIDTH)
            back = lax.all_to_all(back, "device", 0, 0, tiled=True)
            return jnp.mean(jnp.einsum("etd,te->td", back, chosen * gates) ** 2)

        grads = jax.grad(loss_fn)(params)
        axes = {"gate": BOTH, "up": "host", "down": "host"}
        return {k: p - 0.1 * lax.pmean(grads[k], axes[k]) for k, p in params.items()}

    specs, shapes = experts_of(experts)
    step = mapped_over(mesh, local, (specs, P(BOTH)), specs)
    return step, shapes, float32(2 * ROWS * mesh.size, WIDTH)


def every_collective(mesh):
    """Runs one of each collective that every backend has, over one axis or both."""
    hosts, devices = mesh.axis_sizes

    def local(x):
        return (
            lax.psum(x, "device"),
            lax.psum(x * 2, BOTH),
            lax.all_gather(x @ x.T, "host", tiled=True),
            lax.psum_scatter(x * 3, "device", tiled=True),
            lax.all_to_all(x * 4, "device", 0, 0, tiled=True),
            lax.ppermute(x * 5, "host", shifted(hosts)),
            lax.pmax(x * 6, "host"),
        )

    return mapped_over(mesh, local, out_specs=P(BOTH)), float32(4 * devices, 16)


def broadcast(mesh):
    """Broadcasts from the first device of each host to its other devices."""
    local = lambda x: lax.pbroadcast(x, ("device",), 0)  # noqa: E731
    return mapped_over(mesh, local, P(BOTH), P(BOTH)), float32(mesh.size, 16)


def ragged(mesh):
    """Sends rows to the devices of a host, as many as `sizes` says."""

    def local(x, out, sizes):
        offsets = jnp.cumsum(sizes) - sizes
        return lax.ragged_all_to_all(
            x, out, offsets, sizes, offsets, sizes, axis_name="device"
        )

    # This is as wide as a TPU's lanes.
    rows = float32(8 * mesh.shape["device"], 2 * WIDTH)
    step = mapped_over(mesh, local, out_specs=P("device"))
    return step, rows, rows, int32(mesh.shape["device"])


def send_and_receive(mesh):
    """Sends to the next device of a host. The last device sends nothing."""
    pairs = shifted(mesh.shape["device"])[:-1]

    def local(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            token = lax.psend(x, "device", pairs)
            return lax.precv(token, float32(*x.shape), "device", pairs)

    return mapped_over(mesh, local), float32(ROWS, WIDTH)


def loops_and_branches(mesh):
    """Runs collectives in loops of 5, 2 x 3 and unknown length, and in a branch."""

    def local(x, n):
        def many(x, _):
            return lax.psum(x @ x, "device") / 8, None

        def outer(x, _):
            return lax.scan(lambda x, _: (lax.pmean(x @ x, "host"), None), x, None, 3)

        x = lax.scan(many, x, None, 5)[0]
        x = lax.scan(outer, x, None, 2)[0]
        _, x = lax.while_loop(
            lambda c: c[0] < n,
            lambda c: (c[0] + 1, lax.pmax(c[1] @ c[1], "host")),
            (0, x),
        )
        return lax.cond(n > 3, lambda x: lax.psum(x @ x, BOTH), lambda x: x @ x @ x, x)

    return mapped_over(mesh, local), float32(16, 16), int32()


def ring(mesh):
    """Permutes along the devices of a host, in a loop."""
    devices = mesh.shape["device"]

    def local(x, w):
        def hop(_, carry):
            got, total = carry
            return lax.ppermute(got, "device", shifted(devices)), total + got @ w

        return lax.fori_loop(0, devices, hop, (x, jnp.zeros_like(x)))[1]

    step = mapped_over(mesh, local, (P("device"), P()), P("device"))
    return step, float32(16 * devices, WIDTH), float32(WIDTH, WIDTH)


def mapped(mesh):
    """Takes a step by `pmap`, as older training loops do."""

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * lax.pmean(grad, "batch"), lax.pmean(loss, "batch")

    devices = list(mesh.devices.flat)
    f = jax.pmap(step, axis_name="batch", devices=devices, in_axes=(None, 0))
    return f, float32(WIDTH, WIDTH), float32(mesh.size, ROWS, WIDTH)

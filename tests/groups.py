"""Models for groups of several devices, which divide a batch or shard parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

# How the devices of a group shard the parameters, by its axes of two devices each.
SPLITS = {
    "copies": (("device",), {}),
    "fsdp": (("fsdp",), {"up": P("fsdp"), "down": P(None, "fsdp")}),
    "fsdp and tp": (
        ("fsdp", "tp"),
        {"up": P("fsdp", "tp"), "down": P("tp"), "bias": P(None, "tp")},
    ),
}


def mesh_of(groups, name, kind=AxisType.Auto):
    inner, _ = SPLITS[name]
    sizes = (groups, *(2 for _ in inner))
    devices = jax.devices()[: np.prod(sizes)]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(sizes, ("host", *inner), axis_types=kinds, devices=devices)


def params():
    rng = np.random.default_rng(0)
    return {
        "up": rng.normal(size=(4, 8)).astype(np.float32) / 2,
        "bias": rng.normal(size=(1, 8)).astype(np.float32),
        "down": rng.normal(size=(8, 4)).astype(np.float32) / 2,
        "scale": np.ones((1, 3), np.float32),  # does not divide
    }


def placed(mesh, name):
    """Returns the parameters on a mesh, as its groups shard them."""
    split = SPLITS[name][1]
    return {
        key: jax.device_put(leaf, NamedSharding(mesh, split.get(key, P())))
        for key, leaf in params().items()
    }


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    scaled = (hidden @ params["down"])[:, :3] * params["scale"]
    return jnp.mean((scaled - batch["y"]) ** 2)


def batches(steps, size=16):
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=(size, 4)).astype(np.float32),
            "y": rng.normal(size=(size, 3)).astype(np.float32),
        }
        for _ in range(steps)
    ]


def local_step(mesh, **settings):
    """Returns local steps of the groups along the first axis of a mesh."""
    settings = {"axis_name": mesh.axis_names[0]} | settings
    loss = settings.pop("loss", loss_fn)
    tx = settings.pop("tx", optax.adamw(1e-2))
    return pj.make_local_step(loss, tx, mesh=mesh, **settings)

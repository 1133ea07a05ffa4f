"""Clients whose models are objects: a Flax NNX and an Equinox model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ._client import Client, Extra

STEPS, BATCH = 6, 16


class Network(nnx.Module):
    """Two layers, and between them batch norm over the examples of one device."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(5, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the outputs [B, 3] of inputs [B, 5]."""
        return self.out(nnx.relu(self.norm(self.hidden(x))))


def flax_nnx(seed: int) -> Client:
    """Makes the client of an NNX model, split by hand and by the adapter of pipejax."""
    model = Network(rngs=nnx.Rngs(seed))
    graph = nnx.graphdef(model)

    def on_model(model: nnx.Module, batch: Any) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def loss(params: Any, batch: Any, *, model_state: Any) -> tuple[jax.Array, Extra]:
        model = nnx.merge(graph, params, model_state)
        value = on_model(model, batch)
        after = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        return value, Extra(model_state=after)

    return Client(
        loss=loss,
        tx=optax.adam(0.02),
        params=nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        model_state=nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
        batches=_batches(seed),
        terms=3 * BATCH,
        nnx=(model, on_model),
    )


def equinox(seed: int) -> Client:
    """Makes the client of an Equinox model with layer norm and dropout.

    The model is split by `eqx.partition`, as is usual with Equinox.
    """
    import equinox as eqx

    keys = jax.random.split(jax.random.key(seed))
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(5, 8, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.LayerNorm(8),
            eqx.nn.Dropout(0.25),
            eqx.nn.Linear(8, 3, key=keys[1]),
        ]
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, batch: Any, *, rng: jax.Array) -> tuple[jax.Array, Extra]:
        model = eqx.combine(params, static)
        keys = jax.random.split(rng, len(batch["x"]))
        outputs = jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys)
        return jnp.mean((outputs - batch["y"]) ** 2), Extra()

    return Client(
        loss=loss,
        tx=optax.adamw(0.02),
        params=params,
        batches=_batches(seed),
        rng=jax.random.key(seed + 1),
        terms=3 * BATCH,
    )


def _batches(seed: int) -> list[Any]:
    """Returns batches of normal inputs, whose targets are noisy sines of them."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(5, 3))

    def batch() -> dict[str, Any]:
        x = rng.normal(size=(BATCH, 5))
        y = np.sin(x @ directions) + rng.normal(size=(BATCH, 3)) / 2
        return {"x": x.astype(np.float32), "y": y.astype(np.float32)}

    return [batch() for _ in range(STEPS)]

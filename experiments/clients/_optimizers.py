"""The clients that train one small regression with each of the optimizers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._aliases import ALIASES
from ._client import Client, Extra
from ._contrib import CONTRIB
from ._optimizer import STEPS
from ._refused import REFUSED
from ._wrappers import CHAINS, WRAPPERS

OPTIMIZERS = ALIASES | CONTRIB | WRAPPERS | CHAINS | REFUSED
EXAMPLES = 16
# The longest sum is over the squared errors of 16 examples with 3 outputs each.
TERMS = 48


def client(name: str, seed: int) -> Client:
    """Makes the client of an optimizer, by the name of the optimizer."""
    optimizer, start = OPTIMIZERS[name], regression(seed)
    return dataclasses.replace(
        start,
        tx=optimizer.make(),
        takes_value=optimizer.takes_value,
        batches=optimizer.batches([*start.batches]),
        settings=optimizer.settings,
        refused=optimizer.refused,
    )


def regression(seed: int) -> Client:
    """Makes the client of a two-layer network that learns noisy sines by SGD."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    directions = normal(5, 3)

    def batch() -> dict[str, Any]:
        x = normal(EXAMPLES, 5)
        return {"x": x, "y": np.sin(x @ directions) + normal(EXAMPLES, 3) / 2}

    return Client(
        loss=squared_error,
        tx=optax.sgd(0.1),
        params={
            "hidden": normal(5, 8) / 2,
            "bias": np.zeros(8, np.float32),
            "out": normal(8, 3) / 3,
        },
        batches=[batch() for _ in range(STEPS)],
        terms=TERMS,
    )


def squared_error(params: Any, batch: Any) -> tuple[jax.Array, Extra]:
    """Returns the mean squared error."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"][None])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2), Extra()

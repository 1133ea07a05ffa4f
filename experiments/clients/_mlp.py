"""The network of the programs whose train steps share inputs."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HIDDEN = 16


def init(rng: np.random.Generator, inputs: int, outputs: int) -> Any:
    """Returns the layers of a network with two hidden layers."""
    sizes = [inputs, HIDDEN, HIDDEN, outputs]

    def layer(n: int, m: int) -> dict[str, np.ndarray]:
        kernel = rng.normal(size=(n, m)) / np.sqrt(n)
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(m, np.float32)}

    return [layer(n, m) for n, m in itertools.pairwise(sizes)]


def apply(layers: Any, x: jax.Array) -> jax.Array:
    """Returns the outputs [B, outputs] of inputs [B, inputs]."""
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"][None]

"""Makes arrays and problems, which are small where there is no accelerator."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import overlap

IMAGES = 512  # of one GPU in a step of ResNet-18


def filled(shapes: Any, seed: int = 0) -> Any:
    """Returns arrays of given shapes: small normal numbers, or integers below 10."""
    rng = np.random.default_rng(seed)

    def array(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(shape.dtype, jnp.floating):
            values = 0.02 * rng.normal(size=shape.shape)
        else:
            values = rng.integers(10, size=shape.shape)
        return values.astype(shape.dtype)

    return jax.tree.map(array, shapes)


def is_small() -> bool:
    """Returns whether there is no accelerator, so that sizes must fit a CPU."""
    return jax.default_backend() == "cpu"


def large_batch(times: int = 1) -> overlap.Problem:
    """Returns ResNet-18 with a batch that takes a GPU some 15 ms, or a small MLP.

    The batch is `times` as large.
    """
    if is_small():
        return overlap.plain_problem("mlp", times)
    _, size = overlap.IMAGES["resnet18"]
    return overlap.plain_problem("resnet18", times * IMAGES // size)

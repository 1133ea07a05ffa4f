"""A physics-informed network (PINN) for Burgers' equation, with weights for its losses.

The equation is `u_t + u u_x = u_xx / (100 pi)` for x in [-1, 1], with `u(0, x) =
-sin(pi x)` and `u(t, -1) = u(t, 1) = 0`. The loss has a term for each. The weights of
the terms are the shared input. Every five steps, they change so that the gradients of
the weighted terms have similar norms, as in jaxpi.

References:
  Raissi et al., Physics-informed neural networks, Journal of Computational Physics 378,
  2019, https://doi.org/10.1016/j.jcp.2018.10.045
  Wang et al., An Expert's Guide to Training Physics-informed Neural Networks, 2023,
  https://arxiv.org/abs/2308.08468
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import _mlp
from ._client import Client, Extra, Program, Trainer

STEPS, BATCH, EVERY, MOMENTUM = 12, 32, 5, 0.9
VISCOSITY = 0.01 / np.pi
# A weight of the network enters u, u_t, u_x and u_xx at every point.
TERMS = 4 * BATCH

_average = jax.jit(optax.incremental_update)


def pinn(seed: int) -> Program:
    """Makes the program that trains the network with Adam."""
    rng = np.random.default_rng(seed)
    params, batches = _mlp.init(rng, 2, 1), _points(rng)
    ones = {name: np.float32(1) for name in ("residual", "initial", "boundary")}

    def loop(network: Trainer) -> None:
        weights = ones
        for step, batch in enumerate(batches):
            if step and step % EVERY == 0:
                found = _balanced(network.params, batch)
                weights = _average(found, weights, 1 - MOMENTUM)
            network.step(batch, shared=weights)

    def loss(params: Any, batch: Any, *, shared: Any) -> tuple[jax.Array, Extra]:
        terms = _losses(params, batch)
        weighted = jax.tree.map(jnp.multiply, terms, shared)
        return jnp.asarray(sum(weighted.values())), Extra(terms)

    network = Client(
        loss=loss,
        whole=loss,
        tx=optax.adam(0.005),
        params=params,
        shared=ones,
        batches=batches,
        terms=TERMS,
    )
    return Program((network,), loop)


def _losses(params: Any, batch: Any) -> dict[str, jax.Array]:
    """Returns the terms of the loss: mean squares of what should be 0."""

    def u(t: Any, x: Any) -> jax.Array:
        return _mlp.apply(params, jnp.stack([t, x])[None])[0, 0]

    def residual(t: Any, x: Any) -> jax.Array:
        def slope(x: Any) -> jax.Array:
            return jax.jvp(lambda x: u(t, x), (x,), (jnp.ones_like(x),))[1]

        u_x, u_xx = jax.jvp(slope, (x,), (jnp.ones_like(x),))
        return jax.grad(u)(t, x) + u(t, x) * u_x - VISCOSITY * u_xx

    def initial(x: Any) -> jax.Array:
        return u(jnp.zeros_like(x), x) + jnp.sin(jnp.pi * x)

    t, x = batch["t"], batch["x"]
    errors = {
        "residual": jax.vmap(residual)(t, x),
        "initial": jax.vmap(initial)(x),
        "boundary": jax.vmap(u)(t, jnp.sign(x)),
    }
    return {name: jnp.mean(error**2) for name, error in errors.items()}


@jax.jit
def _balanced(params: Any, batch: Any) -> dict[str, jax.Array]:
    """Returns weights with which the gradients of all terms have the same norm."""
    gradients = jax.jacrev(_losses)(params, batch)
    norms = {name: optax.tree.norm(each) for name, each in gradients.items()}
    mean = sum(norms.values()) / len(norms)
    return {name: mean / norm for name, norm in norms.items()}


def _points(rng: np.random.Generator) -> list[Any]:
    def batch() -> dict[str, Any]:
        t, x = rng.uniform(0, 1, size=BATCH), rng.uniform(-1, 1, size=BATCH)
        return {"t": t.astype(np.float32), "x": x.astype(np.float32)}

    return [batch() for _ in range(STEPS)]

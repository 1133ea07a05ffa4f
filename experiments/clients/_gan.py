"""A generative adversarial network (GAN) on eight Gaussians in a ring.

The generator and the discriminator have a train step each, and each step gets the
other's parameters as its shared input.

Reference:
  Goodfellow et al., Generative Adversarial Nets, NeurIPS 2014,
  https://arxiv.org/abs/1406.2661
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import _mlp
from ._client import Client, Extra, Program, Trainer

STEPS, BATCH, LATENT = 6, 32, 4
# A gradient of the discriminator is a sum over real and generated samples.
TERMS = 2 * BATCH


def gan(seed: int) -> Program:
    """Makes the program that trains both players with Adam, one after the other."""
    rng = np.random.default_rng(seed)
    g, d = _mlp.init(rng, LATENT, 2), _mlp.init(rng, 2, 1)
    batches = _batches(rng)

    def loop(generator: Trainer, discriminator: Trainer) -> None:
        for batch in batches:
            discriminator.step(batch, shared=generator.params)
            generator.step(batch["latents"], shared=discriminator.params)

    return Program((_generator(g, d, batches), _discriminator(d, g, batches)), loop)


def _generator(params: Any, discriminator: Any, batches: list[Any]) -> Client:
    def loss(params: Any, latents: Any, *, shared: Any) -> tuple[jax.Array, Extra]:
        logits = _mlp.apply(shared, _mlp.apply(params, latents))
        return jax.nn.softplus(-logits).mean(), Extra()

    latents = [batch["latents"] for batch in batches]
    return _player(loss, params, discriminator, latents)


def _discriminator(params: Any, generator: Any, batches: list[Any]) -> Client:
    def loss(params: Any, batch: Any, *, shared: Any) -> tuple[jax.Array, Extra]:
        real = _mlp.apply(params, batch["samples"])
        generated = _mlp.apply(params, _mlp.apply(shared, batch["latents"]))
        losses = jax.nn.softplus(-real) + jax.nn.softplus(generated)
        return losses.mean(), Extra({"gap": jnp.mean(real - generated)})

    return _player(loss, params, generator, batches)


def _player(loss: Any, params: Any, shared: Any, batches: list[Any]) -> Client:
    return Client(
        loss=loss,
        whole=loss,
        tx=optax.adam(0.01, b1=0.5),
        params=params,
        shared=shared,
        batches=batches,
        terms=TERMS,
    )


def _batches(rng: np.random.Generator) -> list[Any]:
    def batch() -> dict[str, Any]:
        angles = rng.integers(8, size=BATCH) * np.pi / 4
        centres = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        samples = centres + 0.1 * rng.normal(size=(BATCH, 2))
        latents = rng.normal(size=(BATCH, LATENT))
        return {
            "samples": samples.astype(np.float32),
            "latents": latents.astype(np.float32),
        }

    return [batch() for _ in range(STEPS)]

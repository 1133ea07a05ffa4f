"""A small GPT in Flax NNX, and its loss: the next byte of a text."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, n, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(4, n, decode=False, rngs=rngs)
        self.up = nnx.Linear(n, 4 * n, rngs=rngs)
        self.down = nnx.Linear(4 * n, n, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attend(self.norms[0](x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, length, layers, width, *, rngs):
        self.tokens = nnx.Embed(256, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(layers)])

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))[None]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


def loss_fn(model, batch):
    logits = model(batch[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.mean()

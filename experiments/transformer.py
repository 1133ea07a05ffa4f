"""A decoder-only transformer, as pure functions: a line of layers, or one scan of them.

Pre-norm, causal, learned positions, tied embedding (Radford et al. 2019, GPT-2), with
RMS norms and no biases:

- `x += attention(norm(x))`, then `x += mlp(norm(x))`, in each layer
- `logits = norm(x) @ embedding.T`

With `scan` the layers' parameters are stacked, and the compiler sees a loop: one layer
to compile, and what it schedules beside the loop is beside all of it or none.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; the defaults make 38 million parameters.

    Raises:
      ValueError: if a size is not positive, or features do not divide among heads.
    """

    layers: int = 12
    """Blocks of attention and MLP."""
    features: int = 512
    """Width d of the residual stream; the MLP is 4 d wide."""
    heads: int = 8
    """Of attention, d / heads features each."""
    vocabulary: int = 256
    """Tokens: bytes."""
    context: int = 256
    """Positions, the longest sequence."""
    scan: bool = False
    """Whether the layers are a loop."""

    def __post_init__(self) -> None:
        sizes = (self.layers, self.features, self.heads, self.vocabulary, self.context)
        if min(sizes) < 1:
            raise ValueError(f"sizes must be positive; got {self}")
        if self.features % self.heads:
            raise ValueError(
                f"`features` must be a multiple of `heads`; got {self.features} and"
                f" {self.heads}"
            )


def init(key: jax.Array, config: Config) -> Params:
    """Normal weights of deviation 0.02, what is added to the stream by sqrt(2 L) less.

    Args:
      key: PRNG key.
      config: sizes.

    Returns:
      The parameters; `layers` is a list, or with `scan` one layer whose arrays are
      stacked. Both have the same numbers.
    """
    embedding_key, position_key, layers_key = jax.random.split(key, 3)
    d = config.features
    added = 0.02 / (2 * config.layers) ** 0.5

    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, 4)
        return {
            "attention_norm": jnp.ones(d),
            "qkv": 0.02 * jax.random.normal(keys[0], (d, 3 * d)),
            "out": added * jax.random.normal(keys[1], (d, d)),
            "mlp_norm": jnp.ones(d),
            "up": 0.02 * jax.random.normal(keys[2], (d, 4 * d)),
            "down": added * jax.random.normal(keys[3], (4 * d, d)),
        }

    keys = jax.random.split(layers_key, config.layers)
    return {
        "embedding": 0.02 * jax.random.normal(embedding_key, (config.vocabulary, d)),
        "position": 0.02 * jax.random.normal(position_key, (config.context, d)),
        "layers": jax.vmap(layer)(keys) if config.scan else [layer(k) for k in keys],
        "norm": jnp.ones(d),
    }


def loss_fn(config: Config) -> Callable[[Params, jax.Array], jax.Array]:
    """The loss `(params, tokens [B, T + 1]) -> scalar`: mean cross entropy, in nats.

    Each of T tokens predicts the one that follows it; T is `context` at most.
    """

    def sequence(params: Params, tokens: jax.Array) -> jax.Array:
        logits = _logits(params, tokens[:-1], config)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
        return jnp.mean(losses)

    return _mean_of(sequence)


def accuracy_fn(config: Config) -> Callable[[Params, jax.Array], jax.Array]:
    """The share of tokens that the likeliest one is, as `loss_fn`."""

    def sequence(params: Params, tokens: jax.Array) -> jax.Array:
        guesses = jnp.argmax(_logits(params, tokens[:-1], config), axis=-1)
        return jnp.mean(guesses == tokens[1:])

    return _mean_of(sequence)


def _mean_of(
    sequence: Callable[[Params, jax.Array], jax.Array],
) -> Callable[[Params, jax.Array], jax.Array]:
    """Over sequences [B, T + 1], of what is known of one."""

    def mean(params: Params, tokens: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(sequence, in_axes=(None, 0))(params, tokens))

    return mean


def _logits(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Of one sequence [T]: [T, vocabulary]."""
    x = params["embedding"][tokens] + params["position"][: tokens.size]

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        x += _attention(_norm(x, p["attention_norm"]) @ p["qkv"], config) @ p["out"]
        x += jax.nn.gelu(_norm(x, p["mlp_norm"]) @ p["up"]) @ p["down"]
        return x, None

    if config.scan:
        x, _ = lax.scan(layer, x, params["layers"])
    else:
        for p in params["layers"]:
            x, _ = layer(x, p)
    return _norm(x, params["norm"]) @ params["embedding"].T


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Of root mean square 1 [T, d] before `scale` [d]."""
    return scale[None] * x * lax.rsqrt(jnp.mean(x**2, axis=1, keepdims=True) + 1e-6)


def _attention(qkv: jax.Array, config: Config) -> jax.Array:
    """Causal attention [T, d] of queries, keys and values [T, 3 d]."""
    length = len(qkv)
    q, k, v = jnp.moveaxis(qkv.reshape(length, 3, config.heads, -1), 1, 0)
    scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones((1, length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)

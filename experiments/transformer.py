"""A decoder-only transformer as pure functions, with its layers in a list or a scan.

The transformer is pre-norm and causal, with learned positions and a tied embedding
(Radford et al. 2019, GPT-2), but with RMS norms and no biases:

- In each layer, `x += attention(norm(x))`, then `x += mlp(norm(x))`.
- `logits = norm(x) @ embedding.T`

With `scan`, the parameters of the layers are stacked, and the compiler sees a loop with
a single layer to compile. The compiler can then schedule a collective beside the whole
loop or beside none of it.
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
    """The sizes of a transformer. With the defaults, it has 38 million parameters.

    Raises:
      ValueError: If a size is not positive, or if `features` is not a multiple of
        `heads`.
    """

    layers: int = 12
    """Number of layers, each with attention and an MLP."""
    features: int = 512
    """Width d of the residual stream. The hidden layer of the MLPs has width 4 d."""
    heads: int = 8
    """Number of attention heads, each with d / heads features."""
    vocabulary: int = 256
    """Number of different tokens. The default suits bytes."""
    context: int = 256
    """Number of positions, which is the length of the longest sequence."""
    scan: bool = False
    """Run the layers as a loop, with stacked parameters."""

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
    """Draws the first parameters of a transformer.

    Weights are normal with standard deviation 0.02. Weights whose products are added to
    the residual stream have 0.02 / sqrt(2 L), where L is the number of layers. The
    scales of norms are 1.

    Args:
      key: A key from `jax.random.key`.
      config: The sizes.

    Returns:
      The parameters. `layers` is a list of layers, or with `scan` one layer whose
      arrays are stacked. Both hold the same numbers.
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
    """Makes the loss `(params, tokens [B, T + 1]) -> scalar`.

    The loss is the mean cross entropy in nats. Each of the first T tokens of a sequence
    predicts the token that follows it. T is at most `context`.
    """

    def sequence(params: Params, tokens: jax.Array) -> jax.Array:
        logits = _logits(params, tokens[:-1], config)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
        return jnp.mean(losses)

    return _mean_of(sequence)


def accuracy_fn(config: Config) -> Callable[[Params, jax.Array], jax.Array]:
    """Makes the accuracy, a function with the same arguments as that of `loss_fn`.

    The accuracy is the share of tokens that equal the most likely prediction.
    """

    def sequence(params: Params, tokens: jax.Array) -> jax.Array:
        guesses = jnp.argmax(_logits(params, tokens[:-1], config), axis=-1)
        return jnp.mean(guesses == tokens[1:])

    return _mean_of(sequence)


def _mean_of(
    sequence: Callable[[Params, jax.Array], jax.Array],
) -> Callable[[Params, jax.Array], jax.Array]:
    """Turns a function of one sequence into its mean over sequences [B, T + 1]."""

    def mean(params: Params, tokens: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(sequence, in_axes=(None, 0))(params, tokens))

    return mean


def _logits(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Returns the logits [T, vocabulary] of one sequence [T]."""
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
    """Scales the rows of x [T, d] to root mean square 1, and multiplies by `scale`."""
    return scale[None] * x * lax.rsqrt(jnp.mean(x**2, axis=1, keepdims=True) + 1e-6)


def _attention(qkv: jax.Array, config: Config) -> jax.Array:
    """Returns the causal attention [T, d] of queries, keys and values [T, 3 d]."""
    length = len(qkv)
    q, k, v = jnp.moveaxis(qkv.reshape(length, 3, config.heads, -1), 1, 0)
    scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones((1, length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)

"""A decoder-only transformer in Flax NNX, and how a group of devices shards it.

The transformer is that of GPT-2 (Radford et al. 2019) without biases, as nanoGPT trains
it: pre-norm and causal, with learned positions, GELU and a tied embedding. Its layers
are stacked and run as a loop, so that the compiler sees a single layer.

A group shards the weights of each layer over the axis `fsdp`, and gathers them where a
layer uses them. Over an axis `tp`, it splits the heads of the attention and the hidden
features of the MLP.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

# How a weight is split, by its name. The first axis of the weights of layers is that of
# the layers.
SPLITS = {
    "embedding": ("tp", "fsdp"),
    "position": (None, "fsdp"),
    "qkv": (None, "fsdp", None, "tp"),
    "out": (None, "tp", "fsdp"),
    "up": (None, "fsdp", "tp"),
    "down": (None, "tp", "fsdp"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a transformer."""

    layers: int
    """Number of layers, each with attention and an MLP."""
    features: int
    """Width d of the residual stream. The hidden layer of the MLPs has width 4 d."""
    heads: int
    """Number of attention heads, each with d / heads features."""
    vocabulary: int = 256
    """Number of different tokens. The default suits bytes."""
    context: int = 256
    """Number of positions, which is the length of a sequence."""
    remat: bool = False
    """Compute the activations of a layer again in the backward pass."""
    dropout: float = 0.0
    """Share of the activations that a loss with keys sets to 0, as nanoGPT does: of the
    embedding, of the attention's weights, and of what a layer adds."""


SIZES = {
    "nano": Config(layers=4, features=128, heads=4, vocabulary=65, context=64),
    "10M": Config(layers=6, features=384, heads=6),
    "40M": Config(layers=12, features=512, heads=8),
    "124M": Config(12, 768, 12, vocabulary=50_304, context=1024),
    "1B": Config(24, 1792, 14, vocabulary=50_304, context=2048, remat=True),
    "7B": Config(32, 4096, 32, vocabulary=50_304, context=2048, remat=True),
}


class Layer(nnx.Module):
    """A layer: attention and an MLP, each added to the residual stream."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d, self.heads, self.dropout = config.features, config.heads, config.dropout

        def weight(*shape: int, scale: float = 0.02) -> nnx.Param:
            return nnx.Param(scale * jax.random.normal(rngs.params(), shape))

        # What is added to the residual stream is smaller the more layers there are.
        added = 0.02 / (2 * config.layers) ** 0.5
        self.attention_norm = nnx.Param(jnp.ones(d))
        self.qkv = weight(d, 3, d)
        self.out = weight(d, d, scale=added)
        self.mlp_norm = nnx.Param(jnp.ones(d))
        self.up = weight(d, 4 * d)
        self.down = weight(4 * d, d, scale=added)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns the residual stream [B, T, d] after the layer."""
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        drop = functools.partial(dropped, share=self.dropout)
        q, k, v = jnp.moveaxis(
            jnp.einsum(
                "btd,dnf->btnf", norm(x, self.attention_norm[...]), self.qkv[...]
            ),
            2,
            0,
        )
        mixed = attention(q, k, v, self.heads, drop, keys[0])
        x += drop(mixed @ self.out[...], keys[1])
        hidden = jax.nn.gelu(
            norm(x, self.mlp_norm[...]) @ self.up[...], approximate=False
        )
        return x + drop(hidden @ self.down[...], keys[2])


class Transformer(nnx.Module):
    """The transformer, from tokens to logits."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        d, self.remat, self.config = config.features, config.remat, config

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs)

        def weight(*shape: int) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))

        self.embedding = weight(config.vocabulary, d)
        self.position = weight(config.context, d)
        self.layers = layers(rngs)
        self.norm = nnx.Param(jnp.ones(d))

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns the logits [B, T, vocabulary] for tokens [B, T].

        Without a key, nothing is dropped.
        """
        first = keys = None
        if key is not None:
            both = jax.random.split(key, 1 + self.config.layers)
            first, keys = both[0], both[1:]
        embedding = self.embedding[...]
        x = split(
            gathered(embedding)[tokens] + self.position[...][None, : tokens.shape[1]]
        )

        def one(x: jax.Array, layer: Layer, key: jax.Array | None) -> jax.Array:
            return split(layer(x, key))

        run = nnx.remat(one) if self.remat else one
        x = dropped(x, first, self.config.dropout)
        x = nnx.scan(run, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)(
            x, self.layers, keys
        )
        return split(norm(x, self.norm[...]) @ embedding.T)


def split(x: jax.Array) -> jax.Array:
    """Returns activations, split over the axis `fsdp` by their first axis.

    Without this, XLA may leave the weights where they are and sum activations instead.
    On a mesh without this axis, the activations stay as they are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if "fsdp" not in mesh.axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, P("fsdp"))


def gathered(weight: jax.Array) -> jax.Array:
    """Returns a weight that every device has whole, as for a lookup by index.

    XLA's partitioner ends the process if a table is looked up that is split over two
    axes inside `jax.shard_map` over a third (JAX 0.10 and 0.12).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if "fsdp" not in mesh.axis_names:
        return weight
    return jax.lax.with_sharding_constraint(weight, P())


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the layer norm of `x` over its last axis, with a scale and no bias."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return scale * centred * jax.lax.rsqrt(variance + 1e-5)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    heads: int,
    drop: Callable[..., jax.Array],
    key: jax.Array | None,
) -> jax.Array:
    """Returns the causal attention [B, T, d] of queries, keys and values [B, T, d].

    With a key, some of its weights are dropped.
    """
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    if key is None:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    else:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
        past = jnp.tri(q.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        mixed = jnp.einsum("bnts,bsnh->btnh", drop(weights, key), v)
    return mixed.reshape(*mixed.shape[:2], -1)


def dropped(x: jax.Array, key: jax.Array | None, share: float) -> jax.Array:
    """Sets a share of the elements to 0, and keeps the mean; nothing without a key."""
    if key is None or not share:
        return x
    kept = jax.random.bernoulli(key, 1 - share, x.shape)
    return jnp.where(kept, x / (1 - share), 0)


def init(config: Config, seed: int = 0) -> tuple[Any, nnx.State]:
    """Returns the graph of a transformer and its parameters, drawn from a seed."""
    graph, params = nnx.split(Transformer(config, nnx.Rngs(seed)), nnx.Param)
    return graph, params


def loss_fn(graph: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """Makes the loss `(params, tokens [B, T + 1]) -> scalar`.

    The loss is the mean cross entropy in nats. Each of the first T tokens of a sequence
    predicts the token that follows it.
    """

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    return loss


def loss_with_dropout(graph: Any) -> Callable[..., Any]:
    """Makes the loss of `loss_fn` with dropout, which takes a key as `rng`."""

    def loss(params: Any, tokens: jax.Array, *, rng: jax.Array) -> Any:
        logits = nnx.merge(graph, params)(tokens[:, :-1], rng).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean(), pj.Aux()

    return loss


def shardings(params: Any, mesh: Mesh) -> Any:
    """Returns the sharding of every parameter over the inner axes of a mesh.

    Args:
      params: Parameters, or their shapes.
      mesh: A mesh that has one or both of the axes `fsdp` and `tp`, beside that of the
        data.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        split = next((SPLITS[name] for name in names if name in SPLITS), ())
        axes = [axis if axis in mesh.axis_names else None for axis in split]
        fits = [
            axis if axis and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, leaf.shape[: len(axes)], strict=True)
        ]
        return NamedSharding(mesh, P(*fits))

    return jax.tree_util.tree_map_with_path(one, params)

"""Provides a small decoder in Flax, sharded by logical axis names, as lm1b is."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .shapes import BOTH, WIDTH, int32

VOCABULARY, LENGTH, HEADS, BLOCKS = 128, 16, 4, 2
RULES = (
    ("batch", BOTH),
    ("vocab", "device"),
    ("mlp", "device"),
    ("embed", None),
    ("heads", None),
    ("length", None),
)


def spread(init, *names):
    return nn.with_logical_partitioning(init, names)


class Block(nn.Module):
    """A block of attention and an MLP, each behind a layer norm."""

    @nn.compact
    def __call__(self, x, mask):
        init = nn.initializers.xavier_uniform()
        attention = nn.MultiHeadDotProductAttention(
            HEADS, kernel_init=spread(init, "embed", "heads"), use_bias=False
        )
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        y = nn.Dense(4 * WIDTH, kernel_init=spread(init, "embed", "mlp"))(
            nn.LayerNorm()(x)
        )
        return x + nn.Dense(WIDTH, kernel_init=spread(init, "mlp", "embed"))(nn.relu(y))


class Decoder(nn.Module):
    """A decoder that returns the logits of the next token by its embedding."""

    @nn.compact
    def __call__(self, tokens):
        init = spread(nn.initializers.normal(1.0), "vocab", "embed")
        embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=init)
        x = nn.with_logical_constraint(embed(tokens), ("batch", "length", "embed"))
        for _ in range(BLOCKS):
            x = Block()(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


def step(mesh):
    """Returns a step of AdamW on the cross entropy, weighted to leave out padding."""
    model, tx = Decoder(), optax.adamw(1e-3)
    tokens = int32(2 * mesh.size, LENGTH)

    def init(key):
        params = model.init(key, jnp.zeros(tokens.shape, jnp.int32))["params"]
        return params, tx.init(params)

    def loss_fn(params, batch):
        with nn.logical_axis_rules(RULES):
            logits = model.apply({"params": params}, batch)
        weights = (batch > 0).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch)
        return (losses * weights).sum() / weights.sum()

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, (optax.apply_updates(params, updates), opt_state)

    boxed = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    logical = nn.get_partition_spec(boxed)
    shardings = nn.logical_to_mesh_sharding(logical, mesh, RULES)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        nn.unbox(boxed),
        shardings,
    )
    jitted = jax.jit(train_step, out_shardings=(None, shardings), donate_argnums=0)
    rows = NamedSharding(mesh, P(BOTH))
    return jitted, state, jax.ShapeDtypeStruct(tokens.shape, jnp.int32, sharding=rows)

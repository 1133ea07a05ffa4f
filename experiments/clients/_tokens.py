"""Small versions of Flax's text examples nlp_seq and lm1b, with token weights.

Token 0 is padding. The loss is `sum(w l) / sum(w)`, where `l` is the loss of a token
and `w` is 0 for padding and 1 for other tokens. The mean over devices must therefore be
weighted by the number of their tokens. In one batch, a device has nothing but padding,
so that its loss is 0 / 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from ._client import Client, Extra

STEPS, BATCH, LENGTH = 6, 8, 8
VOCABULARY, TAGS, FEATURES = 12, 5, 16
# The longest sums are over all tokens of a batch.
TERMS = BATCH * LENGTH


class Transformer(nn.Module):
    """One pre-norm transformer layer with learned positions, causal or not."""

    outputs: int
    causal: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits [B, T, outputs] of tokens [B, T]."""
        places = self.param("places", nn.initializers.normal(0.1), (LENGTH, FEATURES))
        x = nn.Embed(VOCABULARY, FEATURES)(tokens) + places[None]
        seen = nn.make_attention_mask(jnp.ones_like(tokens), tokens > 0)
        if self.causal:
            seen = nn.combine_masks(seen, nn.make_causal_mask(tokens))
        attention = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
        x += attention(nn.LayerNorm()(x), mask=seen)
        x += nn.Dense(FEATURES)(nn.gelu(nn.Dense(2 * FEATURES)(nn.LayerNorm()(x))))
        return nn.Dense(self.outputs)(nn.LayerNorm()(x))


def nlp_seq(seed: int) -> Client:
    """Makes the client that learns a tag for every word, by AdamW.

    After a warm-up, the learning rate falls like the inverse square root of the step.
    """

    def rate(step: Any) -> Any:
        return 0.02 * jnp.minimum(1.0, (step + 1) / 2) / jnp.sqrt(jnp.maximum(step, 2))

    model = Transformer(TAGS, causal=False)

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Extra]:
        logits: Any = model.apply({"params": params}, batch["words"])
        return _weighted(logits, batch["tags"], batch["words"] > 0)

    tx = optax.adamw(rate, b2=0.98, eps=1e-9, weight_decay=0.1)
    return _client(model, loss, tx, seed)


def lm1b(seed: int) -> Client:
    """Makes the client that predicts every word from the words before it.

    The optimizer clips the gradient by its norm before AdamW.
    """
    model = Transformer(VOCABULARY, causal=True)

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Extra]:
        words = batch["words"]
        before = jnp.pad(words, ((0, 0), (1, 0)))[:, :-1]
        logits: Any = model.apply({"params": params}, before)
        return _weighted(logits, words, words > 0)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(0.01, b2=0.98, eps=1e-9, weight_decay=0.1),
    )
    return _client(model, loss, tx, seed)


def _weighted(
    logits: jax.Array, targets: jax.Array, real: jax.Array
) -> tuple[jax.Array, Extra]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    weights = real.astype(jnp.float32)
    hits = (logits.argmax(-1) == targets) * weights
    metrics = {"accuracy": hits.sum() / weights.sum()}
    mean = (losses * weights).sum() / weights.sum()
    return mean, Extra(metrics, weight=weights.sum())


def _client(model: nn.Module, loss: Any, tx: Any, seed: int) -> Client:
    words = jnp.ones((1, LENGTH), jnp.int32)
    return Client(
        loss=loss,
        whole=loss,
        tx=tx,
        params=model.init(jax.random.key(seed), words)["params"],
        batches=_sentences(seed),
        terms=TERMS,
    )


def _sentences(seed: int) -> list[Any]:
    """Returns batches of padded sentences, whose words count up.

    The tag of a word is its remainder after division by `TAGS`.
    """
    rng = np.random.default_rng(seed)

    def batch(empty: int) -> dict[str, Any]:
        first = rng.integers(VOCABULARY, size=(BATCH, 1))
        words = 1 + (first + np.arange(LENGTH)) % (VOCABULARY - 1)
        lengths = rng.integers(1, LENGTH + 1, size=(BATCH, 1))
        lengths[BATCH - empty :] = 0
        words = np.where(np.arange(LENGTH) < lengths, words, 0).astype(np.int32)
        return {"words": words, "tags": words % TAGS}

    # In the third batch, the last of the four devices has nothing but padding.
    return [batch(empty=BATCH // 4 if step == 2 else 0) for step in range(STEPS)]

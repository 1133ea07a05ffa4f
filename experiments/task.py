"""Makes the loss, the optimizer and the test that train an image classifier."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import pipejax as pj

Optimizer = Literal["sgd", "momentum", "adamw"]


def make_loss(model: nn.Module) -> Callable[..., Any]:
    """Makes the cross entropy, with batch statistics, a dropout key and accuracy."""

    def loss_fn(
        params: Any, batch: Any, *, rng: jax.Array, model_state: Any = None
    ) -> tuple[jax.Array, pj.Aux]:
        logits, after = model.apply(
            {"params": params, **(model_state or {})},
            batch["image"],
            train=True,
            rngs={"dropout": rng},
            mutable=list(model_state or {}),
        )
        logits = logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
        aux = pj.Aux(metrics={"accuracy": accuracy}, model_state=after or None)
        return losses.mean(), aux

    return loss_fn


def make_optimizer(
    name: Optimizer, learning_rate: float, weight_decay: float, clip_norm: float | None
) -> optax.GradientTransformation:
    """Makes SGD, SGD with momentum 0.9 or AdamW, with optional clipping.

    The weight decay is decoupled in AdamW, and added to the gradient (L2) in the
    others. `clip_norm` is the largest global norm of a gradient, or `None`.
    """
    decayed = optax.add_decayed_weights(weight_decay)
    tx = {
        "sgd": optax.chain(decayed, optax.sgd(learning_rate)),
        "momentum": optax.chain(decayed, optax.sgd(learning_rate, momentum=0.9)),
        "adamw": optax.adamw(learning_rate, weight_decay=weight_decay),
    }[name]
    if clip_norm is None:
        return tx
    return optax.chain(optax.clip_by_global_norm(clip_norm), tx)


def make_test(model: nn.Module) -> Callable[..., dict[str, float]]:
    """Makes a test that returns loss and accuracy on a test split, without padding."""

    @jax.jit
    def sums(params: Any, model_state: Any, batch: Any) -> Any:
        variables = {"params": params, **(model_state or {})}
        logits: Any = model.apply(variables, batch["image"], train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        hits = jnp.argmax(logits, axis=-1) == batch["label"]
        return jnp.stack(
            [
                batch["weight"] @ losses,
                batch["weight"] @ hits.astype(jnp.float32),
                batch["weight"].sum(),
            ]
        )

    def test(
        params: Any, batches: Iterable[Any], model_state: Any = None
    ) -> dict[str, float]:
        total = sum(sums(params, model_state, batch) for batch in batches)
        loss, hits, count = (float(x) for x in total)
        return {"test_loss": loss / count, "test_accuracy": hits / count}

    return test

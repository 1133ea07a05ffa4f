"""Distillation with a mean teacher, on two half moons with few labels.

The teacher is a moving average of the student. It is made between the steps, and the
student's step gets it as a shared input, with the weight of the consistency loss.

Reference:
  Tarvainen and Valpola, Mean teachers are better role models, NeurIPS 2017,
  https://arxiv.org/abs/1703.01780
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import _mlp
from ._client import Client, Extra, Program, Trainer

STEPS, BATCH, CLASSES = 8, 32, 2
DECAY, RAMP_UP, NOISE = 0.9, 4, 0.1
# A gradient is a sum over labelled and unlabelled examples.
TERMS = 2 * BATCH

_average = jax.jit(optax.incremental_update)


def mean_teacher(seed: int) -> Program:
    """Makes the program that trains the student with AdamW."""
    rng = np.random.default_rng(seed)
    params, batches = _mlp.init(rng, 2, CLASSES), _moons(rng)

    def loop(student: Trainer) -> None:
        teacher = student.params
        for step, batch in enumerate(batches):
            consistency = min(1.0, step / RAMP_UP)
            shared = {"teacher": teacher, "consistency": consistency}
            student.step(batch, shared=shared)
            teacher = _average(student.params, teacher, 1 - DECAY)

    student = Client(
        loss=_loss,
        tx=optax.adamw(0.01),
        params=params,
        rng=jax.random.key(seed),
        shared={"teacher": params, "consistency": 0.0},
        batches=batches,
        terms=TERMS,
    )
    return Program((student,), loop)


def _loss(
    params: Any, batch: Any, *, shared: Any, rng: jax.Array
) -> tuple[jax.Array, Extra]:
    """Student and teacher see the same examples, each with noise of its own."""
    keys = jax.random.split(rng, 3)
    labelled = _noisy(keys[0], batch["labelled"])
    logits = _mlp.apply(params, labelled)
    supervised = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    student = jax.nn.softmax(_mlp.apply(params, _noisy(keys[1], batch["unlabelled"])))
    teacher = jax.nn.softmax(
        _mlp.apply(shared["teacher"], _noisy(keys[2], batch["unlabelled"]))
    )
    consistency = jnp.mean((student - teacher) ** 2)
    loss = supervised.mean() + shared["consistency"] * consistency
    return loss, Extra({"consistency": consistency})


def _noisy(key: jax.Array, x: jax.Array) -> jax.Array:
    return x + NOISE * jax.random.normal(key, x.shape)


def _moons(rng: np.random.Generator) -> list[Any]:
    """Returns batches of labelled and of unlabelled points on two half circles."""

    def points() -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(CLASSES, size=BATCH)
        angles = rng.uniform(0, np.pi, size=BATCH) + np.pi * labels
        x, y = np.cos(angles) + labels, np.sin(angles) + labels / 2
        return np.stack([x, y], axis=1).astype(np.float32), labels.astype(np.int32)

    def batch() -> dict[str, Any]:
        labelled, labels = points()
        unlabelled, _ = points()
        return {"labelled": labelled, "label": labels, "unlabelled": unlabelled}

    return [batch() for _ in range(STEPS)]

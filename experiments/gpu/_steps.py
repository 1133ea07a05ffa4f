"""Measures steps of five models: time, memory, and hidden communication."""

from typing import Any

import jax
import numpy as np
import optax

import pipejax as pj
from experiments import overhead, overlap

from ._arrays import filled, is_small

MODELS = ("mlp", "cnn", "resnet18", "transformer", "transformer scan")
STEPS: dict[str, dict[str, Any]] = {
    **overhead.STEPS,
    "width 2, sharded optimizer": {"weight_prediction": False, "shard_optimizer": True},
    "width 2, sharded optimizer, predicted": {"shard_optimizer": True},
}


def measured(model: Any) -> dict[str, Any]:
    """Times steps in milliseconds, those of pipejax beside those written by hand."""
    loss_fn, params, batch = _problem(model)
    runs = overhead.variants(loss_fn, params, batch, pj.data_mesh(), STEPS)
    rounds, seconds = (2, 0.01) if is_small() else (7, 0.3)
    return overhead.paired(runs, rounds, seconds, np.random.default_rng(0))


def memory(model: Any, step: str) -> dict[str, Any]:
    """Returns the bytes that the allocator counts, and those of the program."""
    train, state, batch = _training(model, step)
    expected = pj.overlap.inspect(train, state, batch).memory
    for _ in range(3):
        state, info = train.step(state, batch)
    jax.block_until_ready((state, info))
    found = jax.local_devices()[0].memory_stats() or {}
    return {
        "allocator": {
            name: found.get(name) for name in ("bytes_in_use", "peak_bytes_in_use")
        },
        "program": None if expected is None else expected.to_dict(),
    }


def overlapped(model: Any) -> dict[str, Any]:
    """Times compute, communication and step on several devices.

    `covered` is the share of FLOPs that the schedule runs during communication.
    """
    if len(jax.devices()) == 1:
        return {"left_out": "one device has nothing to send"}
    train, state, batch = _training(model, "width 2, predicted")
    report = pj.overlap.inspect(train, state, batch)
    found = pj.overlap.measure(train, state, batch, rounds=2 if is_small() else 7)
    return {"covered": report.covered, **found._asdict()}


def _training(model: Any, step: str) -> tuple[Any, Any, Any]:
    loss_fn, params, batch = _problem(model)
    train = pj.make_train_step(
        loss_fn, optax.adamw(1e-3), mesh=pj.data_mesh(), donate=True, **STEPS[step]
    )
    return train, train.init(params), batch


def _problem(model: Any) -> tuple[Any, Any, Any]:
    problem = overlap.plain_problem("mlp" if is_small() else model, len(jax.devices()))
    return problem.loss_fn, filled(problem.params), filled(problem.batch)

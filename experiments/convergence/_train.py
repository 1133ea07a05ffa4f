"""Trains once, by the real train step."""

import math
from typing import Any

import jax
import numpy as np

import pipejax as pj
from experiments import learning
from pipejax import transforms

from ._contenders import Method, Optimizer


def train(
    task: learning.Task,
    how: Method,
    optimizer: Optimizer,
    *,
    rate: float,
    seed: int,
    devices: int,
) -> dict[str, Any]:
    """Returns the test results after a run, and its training loss in 25 parts.

    The loss of a part is the mean over its steps.
    """
    tx = how.corrected(optimizer, task.schedule(rate), task.clip)
    step = pj.make_train_step(
        task.loss,
        tx,
        mesh=pj.data_mesh(devices),
        width=how.width,
        weight_prediction=how.weight_prediction,
        shard_optimizer=how.shard_optimizer,
        gather_codec=how.gather_codec,
        executor="fused",
    )
    state = step.init(task.init(seed))
    losses = []
    for _, batch in zip(range(task.steps), task.batches(seed), strict=False):
        state, info = step.step(state, batch)
        losses.append(info.loss)
    state, _ = step.drain(state)
    params = state.params
    if how.extrapolates:
        params = transforms.unextrapolated(state.opt_state, params)
    reported = np.array(losses)[how.width - 1 :]  # no earlier loss has arrived
    means = [float(np.mean(part)) for part in np.array_split(reported, 25)]
    end = {**task.test(jax.device_get(params)), "skipped": int(state.skipped)}
    return {
        **{name: finite(value) for name, value in end.items()},
        "losses": [finite(loss) for loss in means],
    }


def finite(value: float) -> float | None:
    """Returns a finite value as it is, and `None` for others, as JSON has no NaN."""
    return value if math.isfinite(value) else None

"""What a step reports."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Scalar = jax.Array | np.generic


class StepInfo(NamedTuple):
    """What one step reports. It travelled with the gradients, and lags as they do.

    Attributes:
      loss: mean loss over the global batch of `width - 1` steps ago, where gradients of
        it were taken; NaN where nothing has arrived, 0 under `jax_debug_nans`.
      metrics: the same mean of the metrics that the loss function returned.
      weight: float32, sum of the weights of that batch; 1 where the loss function
        returns none, 0 where nothing has arrived.
      arrived: bool, whether loss and metrics are real. They are not while the pipeline
        fills, nor for a batch whose weights are all 0.
      applied: bool, whether this step changed the parameters.
      skipped: int32, updates skipped so far because a reduced gradient was not finite.
    """

    loss: Scalar
    metrics: Any
    weight: Scalar
    arrived: Scalar
    applied: Scalar
    skipped: Scalar


def mean_info(infos: Sequence[StepInfo]) -> StepInfo:
    """Averages what several steps report, without those to which nothing has arrived.

    With w the weights of the infos that have arrived and x their losses or metrics:

      `mean = sum w x / sum w`

    so that the mean over an epoch is the mean over its examples, or over its tokens
    where the loss function returns their number. Waits for the devices.

    Args:
      infos: of `train.step` and `train.drain`, at least one.

    Returns:
      A `StepInfo` of NumPy scalars: means of loss and metrics (NaN if nothing has
      arrived), sum of the weights, whether any has arrived or was applied, the last
      `skipped`.

    Raises:
      ValueError: for no info at all.

    >>> from jax.numpy import nan
    >>> first = StepInfo(nan, {"accuracy": nan}, 0.0, False, False, 0)
    >>> second = StepInfo(2.0, {"accuracy": 0.5}, 1.0, True, True, 0)
    >>> third = StepInfo(1.0, {"accuracy": 0.7}, 3.0, True, True, 0)
    >>> mean = mean_info([first, second, third])
    >>> print(mean.loss, round(float(mean.metrics["accuracy"]), 3))
    1.25 0.65
    """
    if not infos:
        raise ValueError("`infos` must hold at least one StepInfo, got none.")
    found = jax.device_get(list(infos))
    arrived = [info for info in found if info.arrived]
    weights = np.array([info.weight for info in arrived], np.float64)

    def mean(*values: Any) -> Any:
        if not weights.any():
            return np.float32(np.nan)
        return np.float32(np.average(values[: weights.size], weights=weights))

    loss, metrics = jax.tree.map(
        mean, *[(info.loss, info.metrics) for info in arrived or found[:1]]
    )
    return StepInfo(
        loss=loss,
        metrics=metrics,
        weight=np.float32(weights.sum()),
        arrived=np.bool_(bool(arrived)),
        applied=np.bool_(any(info.applied for info in found)),
        skipped=found[-1].skipped,
    )

"""The report of a train step, and the mean of several reports."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._core.message import Reduced, mean_of
from pipejax._internal.types import Tree

Scalar = jax.Array | np.generic


class StepInfo(NamedTuple):
    """The report of one step.

    Loss, metrics and weight travel with the gradients. They therefore belong to the
    batch of `width - 1` steps ago, whose gradients arrived in this step.

    Attributes:
      loss: Mean loss over the global batch of `width - 1` steps ago, at the parameters
        at which its gradients were taken. If nothing has arrived, the loss is NaN, or 0
        under `jax_debug_nans`.
      metrics: Means of the metrics that the loss function returned for the same batch,
        NaN or 0 as for `loss`.
      weight: float32, the sum of the weights of that batch. It is 1 if the loss
        function returns no weight, and 0 if nothing has arrived.
      arrived: bool, whether loss and metrics have arrived. It is false while the
        pipeline fills, and for a batch whose weights are all 0.
      applied: bool, whether this step applied an update.
      skipped: int32, the number of updates skipped so far, as a whole or in part,
        because a reduced gradient or change of model state was not finite. A batch with
        NaN counts up to twice if a part of its gradient is exchanged at once.
      grad_norm: float32, the Euclidean norm of the mean gradient of that batch, of all
        arrays together and before `tx`. If a part is exchanged at once, it is the norm
        of the sum that `tx` is given. NaN or 0 as for `loss` if nothing has arrived. It
        is infinite if its square exceeds the range of float32.
    """

    loss: Scalar
    metrics: Tree
    weight: Scalar
    arrived: Scalar
    applied: Scalar
    skipped: Scalar
    grad_norm: Scalar


def mean_info(infos: Sequence[StepInfo] | StepInfo) -> StepInfo:
    r"""Averages loss and metrics over all infos that have arrived.

    Let `x_k` be the loss or a metric of info k, and `w_k` its weight. The mean over all
    infos that have arrived is

    $$\sum_k w_k x_k / \sum_k w_k$$

    The mean over an epoch is therefore the mean over its examples, or over its tokens
    if the loss function returns their number as the weight. The function waits for the
    devices.

    Args:
      infos: Infos that `train.step` and `train.drain` returned, at least one. One info
        may hold those of many steps, as `jax.lax.scan` stacks them.

    Returns:
      A `StepInfo` of NumPy scalars: the means of loss, metrics and `grad_norm` (NaN if
      nothing has arrived), the sum of the weights, whether any info has arrived,
      whether any step applied an update, and the last `skipped`.

    Raises:
      ValueError: If `infos` is empty, or holds a report of local steps.

    Examples:
      >>> from jax.numpy import nan
      >>> first = StepInfo(nan, {"accuracy": nan}, 0.0, False, False, 0, nan)
      >>> second = StepInfo(2.0, {"accuracy": 0.5}, 1.0, True, True, 0, 3.0)
      >>> third = StepInfo(1.0, {"accuracy": 0.7}, 3.0, True, True, 0, 1.0)
      >>> mean = mean_info([first, second, third])
      >>> print(mean.loss, round(float(mean.metrics["accuracy"]), 3))
      1.25 0.65
    """
    given = [infos] if isinstance(infos, StepInfo) else list(infos)
    for info in given:
        _check_info(info)
    found = jax.tree.map(_in_a_row, *jax.device_get(given)) if given else None
    if found is None or not found.arrived.size:
        raise ValueError("`infos` must hold at least one StepInfo, got none.")
    arrived = found.arrived.astype(bool)
    weights = found.weight[arrived].astype(np.float64)

    def mean(values: np.ndarray) -> Any:
        if not weights.any():
            return np.float32(np.nan)
        return np.float32(np.average(values[arrived], weights=weights))

    loss, metrics, norm = jax.tree.map(
        mean, (found.loss, found.metrics, found.grad_norm)
    )
    return StepInfo(
        loss=loss,
        metrics=metrics,
        weight=np.float32(weights.sum()),
        arrived=arrived.any(),
        applied=np.bool_(found.applied.any()),
        skipped=found.skipped[-1],
        grad_norm=norm,
    )


def _check_info(info: Any) -> None:
    if not isinstance(info, StepInfo):
        raise ValueError(
            "`infos` must hold the StepInfo of steps and drains of pj.make_train_step,"
            f" got {type(info).__name__}. A report of local steps does not say over how"
            " many steps it is a mean: average `info.local_loss` over groups and steps."
        )


def _in_a_row(*values: Any) -> np.ndarray:
    """Joins numbers, and arrays of numbers that a scan has stacked."""
    return np.concatenate([np.ravel(value) for value in values])


def info_of(reduced: Reduced, devices: int, norm: jax.Array | None = None) -> StepInfo:
    """Returns what to report of a message.

    `norm` is that of the gradient that the optimizer is given, by default that of the
    message. `applied` and `skipped` are placeholders that the caller replaces.
    """
    message, arrived = reduced.sum, reduced.counts
    passengers = message.passengers
    # Under `jax_debug_nans`, JAX raises an error at any NaN, even if the NaN only says
    # that nothing has arrived.
    nothing = 0.0 if jax.debug_nans.value else jnp.nan
    loss, metrics = jax.tree.map(
        lambda x: mean_of(x, message, devices), (passengers.loss, passengers.metrics)
    )
    if norm is None:
        norm = mean_of(reduced.norm, message, devices)
    loss, metrics, norm = jax.tree.map(
        lambda x: jnp.where(arrived, x, nothing), (loss, metrics, norm)
    )
    weight = jnp.float32(1) if message.weight is None else message.weight
    return StepInfo(
        loss=loss,
        metrics=metrics,
        weight=jnp.where(arrived, weight, 0),
        arrived=arrived,
        applied=arrived,
        skipped=arrived,
        grad_norm=norm,
    )

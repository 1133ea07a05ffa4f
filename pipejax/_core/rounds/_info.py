"""The report of a local step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipejax._core.step import StepInfo
from pipejax._internal.types import Tree


class Arrival(NamedTuple):
    """The report of a round that has arrived.

    Attributes:
      loss: Mean loss over all groups and all steps since the report before, NaN if
        none has arrived (0 in place of NaN under `jax_debug_nans`).
      metrics: Means of the metrics.
      weight: float32, the mean over steps of the sum of the weights over groups, or 1
        if the loss function returns no weight.
      arrived: bool, whether loss and metrics have arrived. It is false for a round
        whose weights are all 0.
      refused: int32, the number of chunks so far that all groups have left out, because
        they were not finite.
    """

    loss: jax.Array
    metrics: Tree
    weight: jax.Array
    arrived: jax.Array
    refused: jax.Array


class LocalInfo(NamedTuple):
    """The report of one step of every group, as the fields of `RoundInfo`."""

    local_loss: jax.Array
    grad_norm: jax.Array
    applied: jax.Array
    skipped: jax.Array

    @classmethod
    def of(cls, info: StepInfo) -> "LocalInfo":
        """Returns the report of one group, without the axis of groups."""
        own = info.loss, info.grad_norm, info.applied, info.skipped
        return cls(*map(jnp.asarray, own))


class RoundInfo(NamedTuple):
    """The report of one local step.

    Loss, metrics and weight travel with the last chunk of a round, beside its last
    step. They are means over all groups and all steps from the last step of the round
    before to the one before this step. If nothing hides the exchange, it follows the
    last step of the round, and they are means over that round.

    Attributes:
      loss: Mean loss of the round that has arrived, NaN if none has (0 in place of NaN
        under `jax_debug_nans`).
      metrics: Means of the metrics of the round, NaN or 0 as for `loss`.
      weight: float32, the mean over steps of the sum of the weights over groups. It is
        1 if the loss function returns no weight, and 0 if nothing has arrived.
      arrived: bool, whether loss and metrics have arrived, with the last chunk of a
        round. It is false for a round whose weights are all 0.
      refused: int32, the number of chunks so far that all groups have left out, because
        they were not finite.
      local_loss: float32 `[groups]`, the loss of each group in this step.
      grad_norm: float32 `[groups]`, the norm of each group's gradient in this step.
      applied: bool `[groups]`, whether each group has made an update in this step.
      skipped: int32 `[groups]`, the number of steps that each group has skipped so far
        because its gradient was not finite.
    """

    loss: jax.Array
    metrics: Tree
    weight: jax.Array
    arrived: jax.Array
    refused: jax.Array
    local_loss: jax.Array
    grad_norm: jax.Array
    applied: jax.Array
    skipped: jax.Array

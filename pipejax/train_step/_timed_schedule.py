"""Chooses the rounds of local steps with `sync_every="auto"`, by timing them."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pipejax._core.executors import Rounds
from pipejax._core.rounds import LocalState
from pipejax._core.step import Inputs
from pipejax._internal.round_schedule import RoundSchedule

_log = logging.getLogger(__name__)


def timed_schedule(
    rounds: Rounds,
    make: Callable[[RoundSchedule], LocalState],
    batch: Any,
    inputs: Inputs | None,
) -> RoundSchedule:
    """Returns the rounds that hide an exchange of all parameters, and logs them.

    `make` returns the first state for a schedule, and `inputs` hold `batch`.
    """
    schedule = rounds.schedule_to_hide(make, _checked(batch, inputs))
    if schedule.overlap_steps:
        message = "rounds of %d steps, which hide an exchange of all parameters"
        _log.info(message, schedule.sync_every)
    else:
        _log.warning(
            "rounds of %d steps, which wait for an exchange of all parameters: in"
            " chunks, it would take longer than the steps beside them",
            schedule.sync_every,
        )
    return schedule


def _checked(batch: Any, inputs: Inputs | None) -> Inputs:
    """Returns the inputs; raises a `ValueError` unless steps can be timed with them."""
    arrays = [isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(batch)]
    if inputs is None or not all(arrays):
        raise ValueError(
            "`batch` must be a batch of arrays for `train.init` with sync_every='auto',"
            f" which times steps; got {type(batch).__name__}. Pass the first batch, or"
            " a number as `sync_every`."
        )
    return inputs

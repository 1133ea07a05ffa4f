"""Times how many steps hide an exchange of all parameters."""

import math
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipejax._internal.types import Tree

MARGIN = 1.25
"""The factor on the number of steps that would just hide an exchange. Times vary."""
ROUNDS = 5


def steps_to_hide(step: Callable[[], Tree], exchange: Callable[[], Tree]) -> int:
    r"""Returns the number of steps beside which an exchange costs no time.

    With the median seconds c of a step without communication and x of an exchange with
    nothing beside it, this is

    $$n = \lceil 1.25 x / c \rceil$$

    All processes return what the first one has found.
    """
    runs = step, exchange
    for run in runs:
        jax.block_until_ready(run())  # compiles the programs
    seconds = [[_seconds(run) for run in runs] for _ in range(ROUNDS)]
    compute, communication = np.median(seconds, axis=0)
    found = np.int32(max(1, math.ceil(MARGIN * communication / compute)))
    return int(np.ravel(multihost_utils.process_allgather(found))[0])


def _seconds(run: Callable[[], Tree]) -> float:
    # No process may begin while another one has not finished the run before.
    multihost_utils.sync_global_devices("pipejax.steps_to_hide")
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start

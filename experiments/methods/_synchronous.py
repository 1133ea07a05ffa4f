"""Hosts that meet: at a barrier, and to compare what each has measured."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def barrier() -> None:
    """Waits until every host is here."""
    multihost_utils.sync_global_devices("methods")


def slowest(values: list[float]) -> list[float]:
    """Of all hosts the largest, value by value, for each of them."""
    every = multihost_utils.process_allgather(np.array(values, np.float64))
    return every.reshape(jax.process_count(), -1).max(axis=0).tolist()

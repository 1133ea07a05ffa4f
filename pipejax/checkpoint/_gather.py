"""Collects a value of every process."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipejax._core.executors import join


def gathered(value: Any) -> list[Any]:
    """Returns the values of all processes, which JSON must hold. All must call it."""
    if jax.process_count() == 1:
        return [value]
    join()  # Only one collective may run at a time.
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(own.size))
    # Few lengths, since each is a program.
    length = 1 << int(max(sizes) - 1).bit_length()
    padded = np.zeros(length, np.uint8)
    padded[: own.size] = own
    every = multihost_utils.process_allgather(padded)
    texts = (bytes(row[:size]) for row, size in zip(every, sizes, strict=True))
    return [json.loads(text) for text in texts]

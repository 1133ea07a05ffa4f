"""The internal of JAX that this package uses, since nothing public replaces it.

JAX 0.10 to 0.12 have no public function that detects a cluster without joining it.
"""

import math
from collections.abc import Sequence

from jax._src.clusters import ClusterEnv

Detected = tuple[str | None, int | None, int | None, Sequence[int] | None]
"""A coordinator's address, number of processes, rank and devices, each if detected."""


def detect_cluster(
    coordinator: str | None, method: str | None, timeout: float
) -> Detected:
    """Detects a cluster as `jax.distributed.initialize` does; raises a ValueError."""
    return ClusterEnv.auto_detect_unset_distributed_params(
        coordinator, None, None, None, method, math.ceil(timeout)
    )

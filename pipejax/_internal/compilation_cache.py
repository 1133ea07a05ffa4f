"""Lets every process of a CPU job find its programs in JAX's persistent cache.

JAX 0.10 to 0.12 write only the programs of process 0. On GPUs, those of the others have
the same keys. On CPUs, a key includes the numbers of the devices, so that all others
would compile everything again at each start.
"""

import logging
from typing import Any

import jax
from jax._src import compiler, distributed

_log = logging.getLogger("pipejax")


def write_in_every_process() -> None:
    """Makes this process write its programs too, if it runs on CPUs.

    If this version of JAX writes its cache in another way, nothing changes.
    """
    write = getattr(compiler, "_cache_write", None)
    if jax.default_backend() != "cpu" or jax.process_index() == 0:
        return
    if write is None:
        _log.info("JAX %s caches the programs of process 0 alone", jax.__version__)
        return

    def as_process_0(*args: Any, **kwargs: Any) -> None:
        state = distributed.global_state
        before, state.process_id = state.process_id, 0
        try:
            write(*args, **kwargs)
        finally:
            state.process_id = before

    compiler._cache_write = as_process_0

"""The key-value store of JAX's runtime, to which JAX 0.10 to 0.12 give no access."""

from typing import Any

from jax._src import distributed


def key_value_client() -> Any:
    """Returns the client of the store, or `None` in a process that has not joined."""
    return distributed.global_state.client


def coordinator() -> str | None:
    """Returns the address of process 0, or `None` in a process that has not joined."""
    return distributed.global_state.coordinator_address

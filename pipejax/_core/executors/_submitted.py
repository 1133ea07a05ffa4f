"""Work that an executor hands to the communication thread, and finds again later."""

import operator
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from ._thread import submit

Result = TypeVar("Result")


def submitted(run: Callable[..., Result], *args: Any) -> Future[Result]:
    """Hands a function to the thread, where JAX behaves as on the caller's."""
    # `with jax.enable_x64()` acts on the caller's thread alone. If the setting were not
    # passed on, the other thread would sum float64 in float32.
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]

    def as_caller() -> Result:
        with jax.enable_x64(x64):
            return run(*args)

    return submit(as_caller)


def identical(a: Any, b: Any) -> bool:
    """Returns whether two pytrees hold the same arrays, not only equal ones."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))

"""Errors that the command line prints in one line, for the user to correct."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


class UsageError(Exception):
    """An error that the user can correct, printed without a traceback."""


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds into a `UsageError` with the same message."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


@contextmanager
def enough_memory(option: str) -> Iterator[None]:
    """Turns a failed allocation into a `UsageError` about an option."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        of_xla = isinstance(error, jax.errors.JaxRuntimeError)
        if of_xla and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UsageError(
            f"`--{option}` must be vectors for which there is memory; got"
            f" {error!s:.200}. Choose shorter ones"
        ) from error

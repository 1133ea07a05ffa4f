"""Errors that the command line prints in one line, for the user to correct."""

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """An error that the user can correct, printed without a traceback.

    The message is one line, or one line for each of several faults.
    """


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds into a `UsageError` with the same message.

    Use it around code whose messages already say what the user has to change.
    """
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error

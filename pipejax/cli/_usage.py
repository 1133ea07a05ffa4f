"""What a user of the command line has to change."""

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """What it is, in a line, or a line for each of many."""


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turns these exceptions, whose message says it all, into what we print."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error

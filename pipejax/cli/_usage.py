"""What a user of the command line has to change."""

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """What it is, in one line."""


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turns these exceptions, whose message says it all, into a line of ours."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error

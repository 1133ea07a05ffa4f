"""Closes files and connections in forked children, such as those of a data loader.

A child shares the open files of its parent: their locks stay held, and their
connections open, until both have ended.
"""

import os
import weakref
from typing import Protocol


class Closes(Protocol):
    def close(self) -> object: ...


def closed_in_children(opened: Closes) -> None:
    """Closes a file or a socket in every child that is forked later."""
    found = weakref.ref(opened)

    def close() -> None:
        held = found()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=close)

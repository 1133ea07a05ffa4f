"""Notes what happens in a process, for `pipejax launch`, which says where time goes."""

import contextlib
import json
import os
import time
from typing import Any

VARIABLE = "PIPEJAX_TIMELINE"
"""The variable with the file that a process appends to."""


def now() -> float:
    """Returns seconds on a clock that all processes of a machine share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def note(what: str, **more: Any) -> None:
    """Appends a line to the timeline of this process, if it has one.

    A process that is killed loses no line.
    """
    if path := os.environ.get(VARIABLE):
        append(path, what, **more)


def append(path: str | os.PathLike[str], what: str, **more: Any) -> None:
    """Appends a line to a timeline; a full disk must not end the job."""
    with contextlib.suppress(OSError), open(path, "a") as file:
        file.write(json.dumps({"at": now(), "what": what, **more}) + "\n")

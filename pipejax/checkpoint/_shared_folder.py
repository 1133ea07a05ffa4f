"""Checks that all processes see one folder."""

import contextlib
import pathlib
import time

import jax

from pipejax._internal import proofs

from ._fault import all_or_none, writing_to
from ._gather import gathered

# Seconds for which another host may not see a new file: NFS looks again after 60.
_UNSEEN = 70.0


def check_shared(place: str) -> None:
    """Raises a `ValueError` if a process does not see what process 0 writes."""
    if jax.process_count() == 1:
        return
    theirs, name = gathered([place, proofs.drawn()])[0]
    if "://" in theirs:
        return
    path, first = pathlib.Path(place) / f".seen-{name}", jax.process_index() == 0

    def write() -> None:
        if first:
            with writing_to(place):
                path.touch()

    def see() -> None:
        # A client of a network file system may have kept that there was nothing.
        end = time.monotonic() + _UNSEEN
        while not path.exists():
            if time.monotonic() > end:
                raise ValueError(
                    f"`folder` must be one that all processes see, got {place}, where"
                    " a process does not see what process 0 writes. Choose a folder of"
                    " a network file system."
                )
            time.sleep(0.05)

    all_or_none(write)
    try:
        all_or_none(see)
    finally:
        if first:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

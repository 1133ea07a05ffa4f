"""Starts a process that does not outlive this one."""

import dataclasses
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ._guard import die_with_parent

Process = subprocess.Popen[str]


@dataclasses.dataclass(frozen=True)
class Start:
    """A process to be started.

    `name` stands before each line that it prints. It may use `cores`, by default all.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    cores: set[int] | None = None


def started(start: Start) -> Process:
    """Starts a process that the kernel kills when this one ends."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent, signal.SIGKILL)
        if start.cores is not None:
            os.sched_setaffinity(0, start.cores)

    return opened(start, preexec_fn=prepare)


def opened(start: Start, **more: Any) -> Process:
    """Starts a process in a group of its own; `more` goes to `subprocess.Popen`."""
    return subprocess.Popen(
        start.command,
        env=dict(start.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group that includes what the process starts
        **more,
    )

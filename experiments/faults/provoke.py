"""Provokes faults: of this process, of its host's link, and of the disk."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Literal

from experiments.cluster import INTERFACE, bucket
from pipejax._internal import timeline

Kind = Literal[
    "killed",
    "coordinator killed",
    "stopped",
    "cut off",
    "slow",
    "disk full",
]
"""The kinds that jobs have in turn."""
Lost = Literal["host lost"]
"""The kind that ends all processes of a host, and empties its memory."""
Fault = tuple[Kind | Lost, int, int]
"""A kind, the rank of the process, and the step, counted from 0, before which it is."""

MEMORY = pathlib.Path("/dev/shm")
"""The folder in the memory of a host, of which each emulated host has its own."""
CUT_OFF = 30
"""How long a link stays cut off or slow, in seconds."""
_SLOW = "2mbit"
"""The rate of a slow link, a hundredth of a job's usual rate.

Steps are slow at this rate, but far from a standstill.
"""
_FILLER = "filler"


def small_disk(folder: pathlib.Path) -> None:
    """Mounts a disk at `folder`, with room for some checkpoints, if there is none."""
    if not folder.is_mount():
        disk = ("-t", "tmpfs", "-o", "size=64m", "tmpfs")
        subprocess.run(["mount", *disk, str(folder)], check=True)


def make_room(folder: pathlib.Path) -> None:
    """Makes room on a disk that has been filled."""
    (folder / _FILLER).unlink(missing_ok=True)


def once(
    fault: Fault,
    folder: pathlib.Path,
    rate: str,
    note: Callable[[], None] = lambda: None,
) -> None:
    """Provokes a fault, unless it was provoked before.

    Args:
      fault: The fault.
      folder: The folder of the checkpoints, in which a file notes the fault.
      rate: The rate of the link.
      note: Called just before the fault.
    """
    kind, _, at = fault
    done = folder / f"provoked {at}"
    if done.exists():
        return
    done.touch()
    sys.stdout.write(f"provoked {timeline.now():.1f}\n")
    sys.stdout.flush()
    note()
    _KINDS[kind](folder, rate)


def _killed(folder: pathlib.Path, rate: str) -> None:
    del folder, rate
    os.kill(os.getpid(), signal.SIGKILL)


def _lost(folder: pathlib.Path, rate: str) -> None:
    del folder, rate
    launcher = os.getppid()
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children")
    # Threads of this process may write into the memory until it ends.
    end = f"kill -9 {launcher} {children.read_text()}; rm -rf {MEMORY}/*"
    subprocess.Popen(["sh", "-c", end], start_new_session=True)
    signal.pause()


def _stopped(folder: pathlib.Path, rate: str) -> None:
    del folder, rate
    os.kill(os.getpid(), signal.SIGSTOP)


def _cut_off(folder: pathlib.Path, rate: str) -> None:
    del folder, rate
    _for_a_while(
        f"ip link set {INTERFACE} down", f"ip link set {INTERFACE} up", CUT_OFF
    )


def _slow(folder: pathlib.Path, rate: str) -> None:
    del folder
    change = ("tc", "qdisc", "change", "dev", INTERFACE, "root")
    slow, fast = (" ".join((*change, *bucket(each))) for each in (_SLOW, rate))
    _for_a_while(slow, fast, CUT_OFF)


def _disk_full(folder: pathlib.Path, rate: str) -> None:
    del rate
    with contextlib.suppress(OSError), (folder / _FILLER).open("wb") as file:
        while True:
            file.write(bytes(2**16))
            file.flush()


def _for_a_while(begin: str, end: str, seconds: int) -> None:
    # In a session of its own, the shell continues when this process is ended.
    subprocess.run(begin.split(), check=True)
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; {end}"], start_new_session=True)


_KINDS: dict[str, Callable[[pathlib.Path, str], None]] = {
    "killed": _killed,
    "coordinator killed": _killed,
    "host lost": _lost,
    "stopped": _stopped,
    "cut off": _cut_off,
    "slow": _slow,
    "disk full": _disk_full,
}

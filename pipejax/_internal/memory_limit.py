"""Reads how much memory the control groups of this process leave to it.

Slurm, Kubernetes and Docker limit a job's memory by control groups. A job that exceeds
its limit is killed, also by files in memory, whose pages are counted as its own.
"""

import pathlib
from collections.abc import Iterator

# By the version of control groups: files of the limit, of the use, and a line of the
# statistics with what the kernel can free at once.
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def in_memory(folder: pathlib.Path, root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Returns whether a folder lies in memory, on a file system such as tmpfs."""
    path, found = folder.resolve(), ("", "")
    for line in _text(root / "proc/self/mounts").splitlines():
        _, place, kind, *_ = line.split()
        if path.is_relative_to(place) and len(place) >= len(found[0]):
            found = place, kind
    return found[1] in ("tmpfs", "ramfs", "devtmpfs")


def left(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Returns the bytes that this process may still take, `None` without a limit."""
    rooms = [_room(folder, version) for folder, version in _groups(root)]
    return min((room for room in rooms if room is not None), default=None)


def _groups(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, int]]:
    """Yields the folder of each group that this process is in, and its version."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
        # Inside a container, the own group is mounted as the root.
        parts = pathlib.PurePath(place).parts[1:]
        for count in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:count]), version


def _room(folder: pathlib.Path, version: int) -> int | None:
    limit, used, free = _NAMES[version]
    most, now = _text(folder / limit).strip(), _text(folder / used).strip()
    if not (most.isdecimal() and now.isdecimal()):  # "max", or no such file
        return None
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    stats = {name: int(value) for name, value in lines}
    return max(0, int(most) - int(now) + stats.get(free, 0))


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

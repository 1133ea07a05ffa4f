"""Files that hold blocks of one step, in a folder that survives the process.

A file is two: the bytes of all blocks, `NAME.data`, and a header, `NAME.json`, that
says where each of them lies and has the checksum of each. The header is written last
and under its final name at once, so a file without a header is none. The pages of the
data are used again for the next step in the same file.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pipejax._internal import memory_limit

from .._fault import DamagedError
from .._meta import digest
from ._blocks import Block

_ALIGNED = 64  # bytes


class Moment(NamedTuple):
    """A step of an attempt. A later attempt counts more than a later step.

    An attempt begins when the job is started, and when it restores a state.
    """

    attempt: int
    step: int


class Label(NamedTuple):
    """The state and the process that a file belongs to.

    Attributes:
      attempt: The number of the attempt in which the file was written.
      step: The step of the state.
      rank: The process whose blocks these are.
      processes: The number of processes of the job.
      rest: The process whose part has the blocks that a copy leaves out; -1 in a part.
      opening: What process 0 drew when all processes opened the manager. Jobs on other
        hosts may have given an attempt the same number.
    """

    attempt: int
    step: int
    rank: int
    processes: int
    rest: int = -1
    opening: str = ""

    @property
    def moment(self) -> Moment:
        return Moment(self.attempt, self.step)


class Header(NamedTuple):
    """The header of a file.

    Attributes:
      label: The state and the process that the file belongs to.
      meta: What `save` writes about a state.
      extras: The extras that `snapshot` was given.
      own: The values in the extras of this process alone.
      offsets: Where each block begins.
      checksums: The CRC-32 of each block.
    """

    label: Label
    meta: dict[str, Any]
    extras: dict[str, Any]
    own: list[Any]
    offsets: dict[Block, int]
    checksums: dict[Block, int]

    @property
    def state(self) -> str:
        """Returns the digest of what must be the same in the files of all processes."""
        return digest([self.meta, self.extras])


def offsets(blocks: Iterable[Block]) -> tuple[dict[Block, int], int]:
    """Returns where each block begins in a file, and the size of the file."""
    found, size = {}, 0
    for each in blocks:
        found[each] = size
        size += -(-each.size // _ALIGNED) * _ALIGNED
    return found, size


def reserve(path: pathlib.Path, size: int) -> mmap.mmap:
    """Maps the data of a file, with room for `size` bytes; the header must be gone.

    Raises an `OSError` if there is no room, before anything is written.
    """
    with open(_data(path), "a+b") as file, _one_at_a_time(path.parent):
        _check_room(path, size - os.fstat(file.fileno()).st_size)
        os.chmod(file.fileno(), 0o600)
        os.ftruncate(file.fileno(), max(size, 1))
        # Without the call, a page without room would end the process by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, max(size, 1))
        return mmap.mmap(file.fileno(), max(size, 1))


@contextlib.contextmanager
def _one_at_a_time(folder: pathlib.Path) -> Iterator[None]:
    """Keeps the processes of a host from counting on the same room."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


_SPARE = 1.25  # of the memory that is left, some is for the training


def _check_room(path: pathlib.Path, size: int) -> None:
    """Raises an `OSError` if a file in memory would exceed the limit of the job.

    The kernel would give the pages, and then kill a process.
    """
    room = memory_limit.left() if memory_limit.in_memory(path.parent) else None
    if room is not None and size > 0 and _SPARE * size > room:
        raise OSError(
            errno.ENOSPC,
            f"a snapshot takes {size / 1e9:.3g} GB more, and the limit of this job's"
            f" memory leaves {room / 1e9:.3g} GB",
        )


def put(data: mmap.mmap, at: int, content: np.ndarray) -> None:
    """Copies a block into the data of a file."""
    content = np.ascontiguousarray(content)
    into = np.frombuffer(data, np.uint8, content.nbytes, at)
    np.copyto(into, content.reshape(-1).view(np.uint8))


def checksum(data: mmap.mmap, at: int, size: int) -> int:
    """Returns the CRC-32 of `size` bytes."""
    with memoryview(data) as view:
        return zlib.crc32(view[at : at + size])


def commit(path: pathlib.Path, header: Header) -> None:
    """Writes the header of a file whose data is complete."""
    text = text_of(header)
    line = json.dumps({"digest": _digest(text), "content": text})
    beside = path.with_suffix(".part")
    beside.write_text(line)
    beside.replace(_header(path))


def withdraw(path: pathlib.Path) -> None:
    """Removes the header of a file, whose data may then be written again."""
    _header(path).unlink(missing_ok=True)


def read_header(path: pathlib.Path) -> Header:
    """Reads the header of a file; raises a `DamagedError` if it is not whole."""
    try:
        line = json.loads(_header(path).read_text())
        text = line["content"]
        if line["digest"] != _digest(text):
            raise DamagedError(f"the header of {path.name} is not what was written")
        return header_of(text)  # another version may have written other fields
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the header of {path.name}: {error}") from error


def text_of(header: Header) -> str:
    """Returns a header as JSON."""
    blocks = [
        [*each, header.offsets[each], header.checksums[each]] for each in header.offsets
    ]
    return json.dumps(header._asdict() | {"offsets": blocks, "checksums": None})


def header_of(text: str) -> Header:
    """Returns the header that `text_of` has written."""
    content = json.loads(text)
    rows = [
        (Block(name, (*start,), (*shape,), dtype), at, sum_)
        for name, start, shape, dtype, at, sum_ in content["offsets"]
    ]
    return Header(**content)._replace(
        label=Label(*content["label"]),
        offsets={each: at for each, at, _ in rows},
        checksums={each: sum_ for each, _, sum_ in rows},
    )


def read(
    path: pathlib.Path, header: Header, blocks: Iterable[Block]
) -> Iterator[tuple[Block, np.ndarray]]:
    """Yields the bytes of some blocks of a file, which may be damaged."""
    with open(_data(path), "rb") as file:
        for each in blocks:
            file.seek(header.offsets[each])
            yield each, taken(each.size, file)


def taken(size: int, file: Any) -> np.ndarray:
    """Reads `size` bytes of a file or a connection; raises an `EOFError` if it ends."""
    # Clearing the bytes would hold the interpreter for seconds.
    content = np.empty(size, np.uint8)
    view, done = content.data, 0
    while done < size:
        count = file.readinto(view[done:])
        if not count:
            raise EOFError(f"the end came after {done} of {size} bytes")
        done += count
    return content


def checked(header: Header, block: Block, content: np.ndarray) -> np.ndarray:
    """Returns a block as an array; raises a `DamagedError` if it is not whole."""
    if zlib.crc32(content.data) != header.checksums[block]:
        raise DamagedError(
            f"{block.name} of process {header.label.rank} is not what was written"
        )
    return np.frombuffer(content, jnp.dtype(block.dtype)).reshape(block.shape)


def names(folder: pathlib.Path) -> list[str]:
    """Returns the names of all files in a folder that have a header."""
    return sorted(path.stem for path in folder.glob("*.json"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _data(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".data")


def _header(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".json")

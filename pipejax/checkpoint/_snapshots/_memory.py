"""The memory of a job's hosts, as one of its processes sees it."""

import contextlib
import os
import pathlib
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pipejax._internal import proofs
from pipejax._internal.key_value_client import coordinator

from .._fault import Fault, agreed, all_or_none
from .._gather import gathered
from . import _file, _peers
from ._blocks import Block
from ._catalogue import Catalogue, Kept, Source, listed
from ._folder import Folder, job_of
from ._holders import holders

Opened = tuple[_file.Header, Callable[[Iterable[Block]], Iterator[Any]]]


class Memory:
    """The files of a job in the memory of its hosts. All processes open it together.

    Attributes:
      rank: The rank of this process.
      processes: The number of processes of the job.
      token: What process 0 has drawn for this opening. It is also the secret.
      fault: Why nothing can be written on some host, or an empty text.
      catalogue: The files that were there at the last listing, by the process that
        lists them.
      attempt: The number of this attempt, which begins with the start of the job, or
        when it restores a state.
      holders: The process that keeps the copy of each process's part.
    """

    def __init__(self, memory: pathlib.Path, checkpoints: str) -> None:
        self.rank, self.processes = jax.process_index(), jax.process_count()
        number = all_or_none(lambda: "" if self.rank else job_of(checkpoints))
        job, self.token = gathered([number, proofs.drawn()])[0]
        self._memory = memory
        self._folder: Folder | None = None
        self._server: _peers.Server | None = None
        own: dict[str, Any] = {"files": [], "host": "", "address": []}
        fault = None
        try:
            own |= self._opened(job)
        except OSError as error:
            fault = Fault(False, str(error))
        fault = agreed(fault)
        self.fault = "" if fault is None else fault.text
        every = gathered(own)
        self._hosts: list[str] = [each["host"] for each in every]
        self.catalogue = _catalogue([each["files"] for each in every])
        attempts = [x.label.attempt for files in self.catalogue for x in files]
        self.attempt = 1 + max(attempts, default=0)
        self.holders = holders(self._hosts)
        self._addresses = self._reachable([(*each["address"],) for each in every])

    def touch(self) -> None:
        """Shows other jobs that this one runs, or has run lately."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def remove_moved(self) -> None:
        """Removes files of parts that this host no longer keeps, as ranks have moved.

        The lowest rank of each host does, once there are newer files on all hosts.
        """
        own = self._hosts[self.rank]
        here = [rank for rank, host in enumerate(self._hosts) if host == own]
        if self.rank != here[0]:
            return
        kept = {f"part-{rank}" for rank in here}
        kept |= {f"copy-{x}" for x, holder in enumerate(self.holders) if holder in here}
        for path in self.path.glob("*-*-*"):
            if path.stem.rpartition("-")[0] not in kept:
                path.unlink(missing_ok=True)

    def list_again(self) -> None:
        """Lists the files anew; all processes call it, and none writes meanwhile."""
        gathered(None)  # until all have come here, one may still write
        files = all_or_none(lambda: listed(self.path))
        self.catalogue = _catalogue(gathered(files))

    @property
    def path(self) -> pathlib.Path:
        """Returns the folder of this job on this host."""
        return self._memory if self._folder is None else self._folder.path

    def read(
        self, sources: list[Source]
    ) -> tuple[_file.Header, Callable[[set[Block]], dict[Block, np.ndarray]]]:
        """Returns the header of the first file, and a function that reads blocks."""

        def contents(blocks: set[Block]) -> dict[Block, np.ndarray]:
            found: dict[Block, np.ndarray] = {}
            for source in sources:
                missing = blocks - found.keys()
                with self.opened(source) as (header, read):
                    there = [each for each in header.offsets if each in missing]
                    for block, content in read(there):
                        found[block] = _file.checked(header, block, content)
            return found

        with self.opened(sources[0]) as (header, _):
            return header, contents

    @contextlib.contextmanager
    def opened(self, source: Source) -> Iterator[Opened]:
        """Opens a file of this host or of another, as `_peers.opened` does."""
        if source.process == self.rank:
            path = self.path / source.name
            header = _file.read_header(path)
            yield header, lambda blocks: _file.read(path, header, blocks)
            return
        address = self._addresses[source.process]
        with _peers.opened(address, self.token.encode(), source.name) as opened:
            yield opened

    def close(self, *, remove: bool) -> None:
        """Ends, and may free what the processes of this host have written."""
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.close(remove=remove)

    def _reachable(self, addresses: list[_peers.Address]) -> list[_peers.Address]:
        """Returns the addresses at which processes of other hosts reach each process.

        On its own host, the name of the coordinator may stand for the loopback.
        """
        others = [x for x in addresses if x and not _peers.is_loopback(x[0])]
        if len({*self._hosts}) == 1 or not others or len(others) == len(addresses):
            return addresses
        mine = addresses[self.rank]
        if mine and _peers.is_loopback(mine[0]):
            mine = _peers.own_address(f"{others[0][0]}:{others[0][1]}"), mine[1]
        return [(*each,) for each in gathered(mine)]

    def _opened(self, job: str) -> dict[str, Any]:
        self._folder = Folder(self._memory, job, self.rank)
        address: list[Any] = []
        if self.processes > 1:
            self._server = _peers.Server(self._folder.path, self.token.encode())
            address = [_peers.own_address(coordinator()), self._server.port]
        # Processes that share the memory share its loss.
        where = self._memory.stat()
        host = f"{socket.gethostname()} {where.st_dev} {where.st_ino} {_boot()}"
        return {"files": listed(self.path), "host": host, "address": address}


def _boot() -> str:
    """Returns the identifier of this boot, which differs between hosts."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _catalogue(files: Sequence[Sequence[Any]]) -> Catalogue:
    """Returns the files that each process has listed, which came as JSON."""
    return [[Kept.of_json(file) for file in each] for each in files]

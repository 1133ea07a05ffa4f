"""Keeps the snapshots of this process, and copies of those of others."""

import contextlib
import logging
import mmap
import pathlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax._internal import proofs, timeline
from pipejax._internal.key_value_client import coordinator

from .._fault import Fault, agreed, all_or_none
from .._gather import gathered
from . import _blocks, _file, _pace, _peers
from ._blocks import Block
from ._catalogue import Catalogue, Kept, Moment, Source, listed, sources
from ._folder import Folder, job_of, remove_abandoned
from ._holders import holders
from ._messages import Messages, Point, Report

_log = logging.getLogger("pipejax")

_LEAVING = 5.0  # seconds to wait for a snapshot under way when a manager is closed


class Taken(NamedTuple):
    """What a snapshot holds: the arrays by name, and what `save` writes beside them."""

    step: int
    meta: dict[str, Any]
    extras: dict[str, Any]
    own: list[Any]  # the values in `extras` of this process alone
    arrays: dict[str, jax.Array]


class Keeper:
    """The snapshots of a job, as one of its processes keeps them. All make one.

    Attributes:
      catalogue: The files that were there, by the process that lists them.
      off: Why no snapshots are made, or an empty text.
      reports: On process 0, what the last complete snapshot has cost each process.
    """

    def __init__(self, memory: pathlib.Path, checkpoints: str, rate: float) -> None:
        self.rank, self.processes = jax.process_index(), jax.process_count()
        number = all_or_none(lambda: "" if self.rank else job_of(checkpoints))
        job, self._secret = gathered([number, proofs.drawn()])[0]
        self._memory, self.off = memory, ""
        self._folder: Folder | None = None
        self._server: _peers.Server | None = None
        own: dict[str, Any] = {"files": [], "host": "", "address": []}
        fault = None
        try:
            own |= self._opened(job)
        except OSError as error:
            fault = Fault(False, f"{error}")
        if fault := agreed(fault):
            self._turn_off(fault.text)
        every = gathered(own)
        self.catalogue: Catalogue = [
            [Kept(*file) for file in each["files"]] for each in every
        ]
        self._addresses = [(*each["address"],) for each in every]
        self._holders = holders([each["host"] for each in every])
        self._attempt = 1 + max(
            (file.attempt for files in self.catalogue for file in files), default=0
        )
        self._messages = Messages(self._secret, self.rank, self.processes)
        self._maps: dict[str, mmap.mmap] = {}
        self._slots: dict[int, int] = {}  # by rank, that of the newest file
        self._calls, self._points, self._copies = 0, 0, 0
        self._due, self._gap = 1, _pace.FIRST
        self._under_way: threading.Thread | None = None
        self.reports: list[Report] = []
        # Stops and beside of the last snapshots, the largest of all processes.
        self._costs = deque[tuple[float, float]](maxlen=3)
        self._last: tuple[float, int] | None = None  # when a call ended, and its number
        self._rate = rate  # faults an hour
        self._restored = False

    @property
    def path(self) -> pathlib.Path:
        """Returns the folder of this job on this host."""
        return self._memory if self._folder is None else self._folder.path

    def newest(self) -> int | None:
        """Returns the step of the newest snapshot, until a state has been restored."""
        moments = [] if self._restored else [*sources(self.catalogue)]
        return max(moments).step if moments else None

    def restored(self, moment: Moment | None = None) -> None:
        """Says that a state has been restored, and from which snapshot, if from one.

        The files of the snapshot are kept until there is a newer one.
        """
        self._restored = True
        for file in self.catalogue[self.rank]:
            if (file.attempt, file.step) == moment:
                self._slots[file.rank] = int(file.name.rpartition("-")[2])

    def is_due(self) -> bool:
        """Counts a call, and returns whether processes decide now."""
        self._calls += 1
        return not self.off and self._calls >= self._due

    def copy(self, take: Callable[[], Taken]) -> bool:
        """Copies what `take` returns, if process 0 says so; returns whether it did."""
        point = self._decided()
        self._due = self._calls + point.steps
        if point.stop:
            self._turn_off(point.stop)
        if point.copy:
            self._copy(take())
        self._last = time.monotonic(), self._calls
        return point.copy

    def settle(self) -> None:
        """Waits until the snapshot under way is complete."""
        if self._under_way is not None:
            self._under_way.join()

    def read(
        self, sources: list[Source]
    ) -> tuple[_file.Header, Callable[[set[Block]], dict[Block, np.ndarray]]]:
        """Returns the header of the first file, and a function that reads blocks."""

        def contents(blocks: set[Block]) -> dict[Block, np.ndarray]:
            found: dict[Block, np.ndarray] = {}
            for source in sources:
                with self._file(source) as (header, read):
                    there = [x for x in header.offsets if x in blocks - found.keys()]
                    for block, content in read(there):
                        found[block] = _file.checked(header, block, content)
            return found

        with self._file(sources[0]) as (header, _):
            return header, contents

    def close(self, *, remove: bool) -> None:
        """Ends, and frees the memory of this host's files if all processes want it."""
        if self._under_way is not None:
            self._under_way.join(_LEAVING)
        if remove and not self.off:
            remove = self._messages.all_leave(_LEAVING)
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.close(remove=remove)

    def _opened(self, job: str) -> dict[str, Any]:
        self._folder = Folder(self._memory, job, self.rank)
        address: list[Any] = []
        if self.processes > 1:
            self._server = _peers.Server(self._folder.path, self._secret.encode())
            address = [_peers.own_address(coordinator()), self._server.port]
        # Processes that share the memory share its loss.
        where = self._memory.stat()
        host = f"{socket.gethostname()} {where.st_dev} {where.st_ino}"
        return {"files": listed(self.path), "host": host, "address": address}

    def _turn_off(self, why: str) -> None:
        self.off = why
        said = _log.warning if self.rank == 0 else _log.info
        said(
            "no more snapshots in %s: %s. After a fault, the job goes on from the"
            " newest checkpoint on disk.",
            self._memory,
            why,
        )

    def _decided(self) -> Point:
        self._points += 1
        if self.rank == 0:
            self._messages.decide(self._points, self._decision())
        return self._messages.decision(self._points)

    def _decision(self) -> Point:
        """Decides for all processes whether they copy, and when they ask again."""
        if self._under_way is None:
            return Point(True, self._gap)
        if self._under_way.is_alive():
            return Point(False, max(1, self._gap // 4))
        if failed := [each.failed for each in self.reports if each.failed]:
            return Point(False, 1, failed[0])
        assert self._last is not None
        since, calls = self._last
        step = (time.monotonic() - since) / (self._calls - calls)
        self._costs.append(
            (
                max(each.stops for each in self.reports),
                max(each.beside for each in self.reports),
            )
        )
        # A link that is slow for a while must not put off snapshots for long.
        stops, beside = (min(costs) for costs in zip(*self._costs, strict=True))
        self._gap = _pace.steps_between(stops, beside, step, self._rate)
        return Point(True, self._gap)

    def _copy(self, taken: Taken) -> None:
        jax.block_until_ready(taken.arrays)
        began = time.monotonic()
        self._copies += 1
        name, offsets, failed = "", dict[Block, int](), ""
        try:
            name, offsets = self._copied(taken.arrays)
        except OSError as error:
            failed = f"{error} (process {self.rank})"
        header = _file.Header(
            attempt=self._attempt,
            step=taken.step,
            rank=self.rank,
            processes=self.processes,
            meta=taken.meta,
            extras=taken.extras,
            own=taken.own,
            rest=-1,
            offsets=offsets,
            checksums={},
        )
        stops = time.monotonic() - began
        self._under_way = threading.Thread(
            target=self._complete,
            args=(self._copies, name, header, Report(stops, 0.0, failed)),
            kwargs={"before": self._under_way},
            name="pipejax snapshot",
            daemon=True,
        )
        self._under_way.start()
        timeline.note("saved", seconds=stops)

    def _copied(self, arrays: dict[str, jax.Array]) -> tuple[str, dict[Block, int]]:
        """Copies the blocks of this process into its other file."""
        held = _blocks.held(arrays)
        offsets, size = _file.offsets(held)
        name = self._next("part", self.rank)
        data = self._reserved(name, size)
        for block, content in held.items():
            _file.put(data, offsets[block], np.asarray(content))
        return name, offsets

    def _complete(
        self,
        number: int,
        name: str,
        header: _file.Header,
        report: Report,
        before: threading.Thread | None,
    ) -> None:
        """Commits the part, copies those of others, and reports."""
        began = time.monotonic()
        if before is not None:
            before.join()
        try:
            if name:
                self._commit(name, header)
            # A process that has failed must not keep others waiting.
            self._messages.complete(number, name)
            for rank, holder in enumerate(self._holders):
                if holder == self.rank and name:
                    self._copy_part(rank, number, {*header.offsets})
        except Exception as error:  # reported, and raised by nobody
            said = f"{type(error).__name__}: {error} (process {self.rank})"
            report = report._replace(failed=report.failed or said)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job has ended
            seconds = time.monotonic() - began
            self._messages.report(number, report._replace(beside=seconds))
            # Until then, this process must not end.
            if (holder := self._holders[self.rank]) is not None:
                self._messages.reported(number, holder)
            if self.rank == 0:
                self.reports = self._messages.reports(number)
                self._messages.forget(number - 1)

    def _copy_part(self, rank: int, number: int, own: set[Block]) -> None:
        """Copies the blocks of another process that this one does not hold itself."""
        theirs = self._messages.completed(number, rank)
        if not theirs:
            return
        address = self._addresses[rank]
        with _peers.opened(address, self._secret.encode(), theirs) as (header, read):
            blocks = [block for block in header.offsets if block not in own]
            offsets, size = _file.offsets(blocks)
            name = self._next("copy", rank)
            data = self._reserved(name, size)
            for block, content in read(blocks):
                _file.put(data, offsets[block], _file.checked(header, block, content))
            self._commit(name, header._replace(rest=self.rank, offsets=offsets))

    def _commit(self, name: str, header: _file.Header) -> None:
        data = self._maps[name]
        sums = {x: _file.checksum(data, at, x.size) for x, at in header.offsets.items()}
        _file.commit(self.path / name, header._replace(checksums=sums))

    def _next(self, kind: str, rank: int) -> str:
        """Returns the name of the file to write next, in place of the older one."""
        self._slots[rank] = 1 - self._slots.get(rank, 1)
        return f"{kind}-{rank}-{self._slots[rank]}"

    def _reserved(self, name: str, size: int) -> mmap.mmap:
        """Returns the memory of a file, whose header is gone."""
        path = self.path / name
        _file.withdraw(path)
        data = self._maps.get(name)
        if data is None or len(data) < size:
            try:
                data = _file.reserve(path, size)
            except OSError:
                remove_abandoned(self._memory, 0.0, but=self.path)
                data = _file.reserve(path, size)
            self._maps[name] = data
            said = "a snapshot takes %.3g GB of %s, in %s; there are two of each"
            _log.info(said, size / 1e9, self._memory, name)
        return data

    @contextlib.contextmanager
    def _file(self, source: Source) -> Any:
        if source.process == self.rank:
            path = self.path / source.name
            header = _file.read_header(path)
            yield header, lambda blocks: _file.read(path, header, blocks)
            return
        address = self._addresses[source.process]
        with _peers.opened(address, self._secret.encode(), source.name) as opened:
            yield opened

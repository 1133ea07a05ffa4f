"""Keeps the snapshots of this process, and copies of those of others."""

import contextlib
import logging
import mmap
import pathlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax._internal import timeline

from .._meta import digest
from . import _blocks, _file, _pace
from ._blocks import Block
from ._catalogue import Source, sources
from ._file import Moment
from ._folder import ABANDONED, remove_abandoned
from ._memory import Memory
from ._messages import Messages, Outcome, Point

_log = logging.getLogger("pipejax")

_DIFFERENT = (
    "`extras` must be the same on all processes, or a snapshot does not count. Save"
    " numbers of the whole job, or mark what differs: checkpoint.PerProcess(value)"
)
# Seconds to wait, when a manager is closed, for a snapshot under way, and for other
# processes to close theirs: one of them may still write a picture or an export.
_LAST, _LEAVING = 5.0, 60.0
_ALIVE = 60.0  # seconds after which the folder is touched again


class Taken(NamedTuple):
    """A state as a snapshot keeps it: arrays, and what `save` writes beside them."""

    step: int
    meta: dict[str, Any]
    extras: dict[str, Any]
    own: list[Any]  # the values in `extras` of this process alone
    arrays: dict[str, jax.Array]  # by name


class Keeper:
    """Makes the snapshots of a job, together with its other processes.

    Attributes:
      memory: The files of the job on all hosts.
      off: Why no snapshots are made, or an empty text.
      outcomes: On process 0, those of the last snapshot, by rank.
    """

    def __init__(
        self, folder: pathlib.Path, checkpoints: str, faults_per_hour: float
    ) -> None:
        self._where, self._faults_per_hour = folder, faults_per_hour
        self.memory, self.off = Memory(folder, checkpoints), ""
        if self.memory.fault:
            self._turn_off(self.memory.fault)
        self._messages = Messages(
            self.memory.token, self.memory.rank, self.memory.processes
        )
        self._maps: dict[str, mmap.mmap] = {}
        self._slots: dict[int, int] = {}  # by rank, that of the newest file
        self._calls, self._points, self._copies = 0, 0, 0
        self._due, self._gap = 1, _pace.FIRST
        self._under_way: threading.Thread | None = None
        self.outcomes: list[Outcome] = []
        # Stops and beside of the last snapshots, the largest of all processes.
        self._costs = deque[tuple[float, float]](maxlen=3)
        self._last: tuple[float, int] | None = None  # when a call ended, and its number
        self._restored, self._touched = False, time.monotonic()

    def newest(self) -> int | None:
        """Returns the step of the newest snapshot, until a state has been restored."""
        moments = [] if self._restored else [*sources(self.memory.catalogue)]
        return max(moments).step if moments else None

    def list_own(self) -> None:
        """Waits for the snapshot under way, and lists those that were made here too."""
        if self._copies:
            self.settle()
            self.memory.list_again()

    def restored(self) -> None:
        """Begins a new attempt, whose snapshots count more than all before."""
        self._restored = True
        self.memory.attempt += 1
        self._due = self._calls + 1

    def keep(self, moment: Moment) -> None:
        """Keeps the files of a snapshot until there is a newer one."""
        for file in self.memory.catalogue[self.memory.rank]:
            if file.label.moment == moment:
                self._slots[file.label.rank] = int(file.name.rpartition("-")[2])

    def is_due(self) -> bool:
        """Counts a call, and returns whether processes decide now."""
        self._calls += 1
        if time.monotonic() - self._touched > _ALIVE:
            self._touched = time.monotonic()
            self.memory.touch()
        return not self.off and self._calls >= self._due

    def copy(self, take: Callable[[], Taken]) -> bool:
        """Copies what `take` returns, if process 0 says so; returns whether it did."""
        point = self._decided()
        self._due = self._calls + point.steps
        if point.stop:
            self._turn_off(point.stop)
        if point.copy:
            if self._copies == 1:  # the first one is complete on all processes
                self.memory.remove_moved()
            self._copy(take())
        self._last = time.monotonic(), self._calls
        return point.copy

    def settle(self) -> None:
        """Waits until the snapshot under way is complete."""
        if self._under_way is not None:
            self._under_way.join()

    def close(self, *, remove: bool) -> None:
        """Ends, and frees the memory of this host's files if all processes want it."""
        if self._under_way is not None:
            self._under_way.join(_LAST)
        if remove and not self.off:
            remove = self._messages.all_leave(_LEAVING)
        self._maps.clear()  # memory of a removed file is freed with its last map
        self.memory.close(remove=remove)

    def _turn_off(self, why: str) -> None:
        self.off = why
        said = _log.warning if self.memory.rank == 0 else _log.info
        said(
            "no more snapshots in %s: %s. After a fault, the job goes on from the"
            " newest checkpoint on disk.",
            self._where,
            why,
        )

    def _decided(self) -> Point:
        self._points += 1
        if self.memory.rank == 0:
            self._messages.decide(self._points, self._decision())
        return self._messages.decision(self._points)

    def _decision(self) -> Point:
        """Decides for all processes whether they copy, and when they ask again."""
        if self._under_way is None or self._last is None:
            return Point(True, self._gap)
        if self._under_way.is_alive():
            return Point(False, max(1, self._gap // 4))
        if not self.outcomes:
            return Point(False, 1, "a snapshot was not complete in time")
        if failed := [each.failed for each in self.outcomes if each.failed]:
            return Point(False, 1, failed[0])
        if len({each.state for each in self.outcomes}) > 1:
            return Point(False, 1, _DIFFERENT)
        since, calls = self._last
        step = (time.monotonic() - since) / (self._calls - calls)
        self._costs.append(
            (
                max(each.stops for each in self.outcomes),
                max(each.beside for each in self.outcomes),
            )
        )
        # A link that is slow for a while must not put off snapshots for long.
        stops, beside = (min(costs) for costs in zip(*self._costs, strict=True))
        self._gap = _pace.steps_between(stops, beside, step, self._faults_per_hour)
        return Point(True, self._gap)

    def _copy(self, taken: Taken) -> None:
        jax.block_until_ready(taken.arrays)
        began = time.monotonic()
        self._copies += 1
        name, offsets, failed = "", dict[Block, int](), ""
        try:
            name, offsets = self._copied(taken.arrays)
        except OSError as error:
            failed = f"{error} (process {self.memory.rank})"
        memory = self.memory
        label = _file.Label(
            *(memory.attempt, taken.step, memory.rank, memory.processes),
            # The token itself is a secret.
            opening=digest(memory.token)[:16],
        )
        header = _file.Header(
            label, taken.meta, taken.extras, taken.own, offsets, checksums={}
        )
        stops = time.monotonic() - began
        self.outcomes = []
        self._under_way = threading.Thread(
            target=self._complete,
            args=(self._copies, name, header, Outcome(stops, 0.0, failed)),
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
        name = self._next("part", self.memory.rank)
        data = self._reserved(name, size)
        for block, content in held.items():
            _file.put(data, offsets[block], np.asarray(content))
        return name, offsets

    def _complete(
        self,
        number: int,
        name: str,
        header: _file.Header,
        outcome: Outcome,
        before: threading.Thread | None,
    ) -> None:
        """Commits the part, copies those of others, and says the outcome."""
        began = time.monotonic()
        if before is not None:
            before.join()
        rank, holders = self.memory.rank, self.memory.holders
        try:
            committed = ""
            try:
                if name:
                    self._commit(name, header)
                    committed = name
            finally:
                # A process that has failed must not keep others waiting.
                self._messages.complete(number, committed)
            for other, holder in enumerate(holders):
                if holder == rank and name:
                    self._copy_part(other, number, {*header.offsets})
        except Exception as error:  # process 0 tells all, and none of them ends
            said = f"{type(error).__name__}: {error} (process {rank})"
            outcome = outcome._replace(failed=outcome.failed or said)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the job has ended
            seconds = time.monotonic() - began
            outcome = outcome._replace(beside=seconds, state=header.state)
            self._messages.end(number, outcome)
            # Until then, this process must not end.
            if (holder := holders[rank]) is not None:
                self._messages.outcome(number, holder)
            if rank == 0:
                self.outcomes = self._messages.outcomes(number)
                self._messages.forget(number - 1)

    def _copy_part(self, rank: int, number: int, own: set[Block]) -> None:
        """Copies the blocks of another process that this one does not hold itself."""
        theirs = self._messages.completed(number, rank)
        if not theirs:
            return
        with self.memory.opened(Source(rank, theirs)) as (header, read):
            blocks = [block for block in header.offsets if block not in own]
            offsets, size = _file.offsets(blocks)
            name = self._next("copy", rank)
            data = self._reserved(name, size)
            for block, content in read(blocks):
                _file.put(data, offsets[block], _file.checked(header, block, content))
            label = header.label._replace(rest=self.memory.rank)
            self._commit(name, header._replace(label=label, offsets=offsets))

    def _commit(self, name: str, header: _file.Header) -> None:
        data = self._maps[name]
        sums = {x: _file.checksum(data, at, x.size) for x, at in header.offsets.items()}
        _file.commit(self.memory.path / name, header._replace(checksums=sums))

    def _next(self, kind: str, rank: int) -> str:
        """Returns the name of the file to write next, in place of the older one."""
        self._slots[rank] = 1 - self._slots.get(rank, 1)
        return f"{kind}-{rank}-{self._slots[rank]}"

    def _reserved(self, name: str, size: int) -> mmap.mmap:
        """Returns the memory of a file, whose header is gone."""
        path = self.memory.path / name
        _file.withdraw(path)
        data = self._maps.get(name)
        if data is None or len(data) < size:
            try:
                data = _file.reserve(path, size)
            except OSError:
                remove_abandoned(self._where, ABANDONED, but=self.memory.path)
                data = _file.reserve(path, size)
            self._maps[name] = data
            said = "a snapshot takes %.3g GB of %s, in %s; there are two of each"
            _log.info(said, size / 1e9, self._where, name)
        return data

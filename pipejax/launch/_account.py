"""Keeps the timelines of a host's processes, and says where their time went."""

import contextlib
import dataclasses
import json
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence

from pipejax._internal import timeline
from pipejax._internal.fault_rate import VARIABLE, estimated

from ._goodput import Goodput, events, goodput
from ._start import Start

_LOOK = 1.0  # seconds between two looks at a timeline
_STEPPING = 5.0  # seconds of steps after which a job has settled
_SILENT = 60.0  # the same for a job that notes no steps, from its beginning


class Account:
    """The timelines of a job's processes on this host, over all of its attempts."""

    def __init__(
        self,
        folder: pathlib.Path,
        faults_per_hour: float | None,
        file: pathlib.Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._file, self._say = folder, file, say
        self._given = faults_per_hour
        self._begun = timeline.now()
        self._attempts = 0
        # When this attempt began, was looked at, and was first seen to take steps.
        self._began = self._looked = self._begun
        self._stepped = math.inf
        self._offset = 0  # where this attempt begins in the first timeline
        self._paths: list[str] = []

    def begun(self, starts: Sequence[Start]) -> list[Start]:
        """Notes that an attempt begins; returns its processes with their variables.

        Variables that are set already stay.
        """
        hours = (timeline.now() - self._begun) / 3600.0
        rate = self._given or estimated(self._attempts, hours)
        self._attempts += 1
        self._began, self._stepped = timeline.now(), math.inf
        with_variables = [
            dataclasses.replace(
                start,
                environment={
                    timeline.VARIABLE: str(self._folder / start.name),
                    VARIABLE: f"{rate:.6g}",
                    **start.environment,
                },
            )
            for start in starts
        ]
        self._paths = [each.environment[timeline.VARIABLE] for each in with_variables]
        for path in self._paths:
            timeline.append(path, "begun")
        self._offset = sum(path.stat().st_size for path in self._first_timeline())
        return with_variables

    def settled(self) -> bool:
        """Returns whether the job has taken steps for some seconds.

        A job that notes no steps has settled a minute after its beginning.
        """
        now = timeline.now()
        if self._stepped == math.inf and now - self._looked > _LOOK:
            self._looked = now
            for path in self._first_timeline():
                if b'"what": "step"' in path.read_bytes()[self._offset :]:
                    self._stepped = now
        return now - self._stepped > _STEPPING or now - self._began > _SILENT

    def _first_timeline(self) -> list[pathlib.Path]:
        """Returns the file of the first process, or nothing if it was not written."""
        return [path for path in map(pathlib.Path, self._paths[:1]) if path.exists()]

    def result(self) -> Goodput | None:
        """Returns the goodput so far; `None` without steps."""
        found = [events(pathlib.Path(path)) for path in self._paths]
        return goodput(found, self._begun, timeline.now()) if found else None

    def show(self) -> None:
        """Says the goodput so far, and writes it to the file, if there is one.

        Without steps, it says only that a file is not written.
        """
        if (found := self.result()) is None:
            if self._file is not None:
                self._say(
                    f"{self._file} is not written: goodput needs two steps that the"
                    " program has reported by Watchdog.step, with numbers that grow"
                )
            return
        self._say(str(found))
        if self._file is not None:
            content = found._asdict() | {"goodput": found.share}
            content["restarts"] = self._attempts - 1
            try:
                self._file.write_text(json.dumps(content, indent=1) + "\n")
            except OSError as error:
                self._say(f"{self._file} is not written: {error}")


@contextlib.contextmanager
def account(
    faults_per_hour: float | None,
    file: pathlib.Path | None,
    say: Callable[[str], None],
) -> Iterator[Account]:
    """Opens an account, which says the goodput at its end."""
    with tempfile.TemporaryDirectory(prefix="pipejax-") as folder:
        opened = Account(pathlib.Path(folder), faults_per_hour, file, say)
        try:
            yield opened
        finally:
            opened.show()

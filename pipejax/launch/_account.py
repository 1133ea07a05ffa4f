"""Keeps the timelines of a host's processes, and says where their time went."""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence

from pipejax._internal import timeline
from pipejax._internal.fault_rate import VARIABLE, estimated

from ._goodput import Goodput, events, goodput
from ._start import Start


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
        self._paths: list[str] = []

    def begun(self, starts: Sequence[Start]) -> list[Start]:
        """Notes that an attempt begins; returns its processes with their variables.

        Variables that are set already stay.
        """
        hours = (timeline.now() - self._begun) / 3600.0
        rate = self._given or estimated(self._attempts, hours)
        self._attempts += 1
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
        return with_variables

    def result(self) -> Goodput | None:
        """Returns the goodput so far; `None` without steps."""
        found = [events(pathlib.Path(path)) for path in self._paths]
        return goodput(found, self._begun, timeline.now()) if found else None

    def show(self) -> None:
        """Says the goodput so far, and writes it to the file, if there is one."""
        if (found := self.result()) is None:
            return
        self._say(str(found))
        if self._file is not None:
            content = found._asdict() | {"goodput": found.share}
            content["restarts"] = self._attempts - 1
            self._file.write_text(json.dumps(content, indent=1) + "\n")


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

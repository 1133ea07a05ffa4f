"""The beats and diagnoses of a job, kept in the key-value store of JAX's runtime.

A beat is what a process reports about itself once a second. A diagnosis is a text that
names the process at fault.
"""

import dataclasses
from typing import Any

from ._diagnosis import Beat

_WATCHDOGS = "pipejax/watchdogs/"  # the folder of all keys below


@dataclasses.dataclass(frozen=True)
class Board:
    """One process's access to the beats and diagnoses of its job.

    Process 0 hosts the store. If process 0 cannot be reached, the methods raise an
    exception, or block for minutes.
    """

    client: Any
    # The index of the watchdog among those that the program opens in turn. A board
    # shows only what boards of the same number have written.
    number: int = 0

    @classmethod
    def opened(cls, client: Any, rank: int) -> "Board":
        """Opens a board whose number this process has not used yet."""
        folder = f"{_WATCHDOGS}of/{rank}/"
        number = len(client.key_value_dir_get(folder))
        client.key_value_set(f"{folder}{number}", "", allow_overwrite=True)
        return cls(client, number)

    def post(self, beat: Beat) -> None:
        name = f"{self._beats}{beat.rank}/last"
        self.client.key_value_set(name, beat.to_json(), allow_overwrite=True)

    def beats(self, rank: int | None = None) -> list[Beat]:
        """Returns the last beat of every process, or only that of process `rank`."""
        # The slash keeps the keys of process 1 apart from those of process 11.
        folder = self._beats if rank is None else f"{self._beats}{rank}/"
        found = self.client.key_value_dir_get(folder)
        return [Beat.from_json(text) for _, text in found]

    def report_fault(self, rank: int, diagnosis: str) -> None:
        """Publishes the diagnosis of process `rank` for all processes."""
        name = f"{self._diagnoses}{rank}"
        self.client.key_value_set(name, diagnosis, allow_overwrite=True)

    def diagnosis(self) -> str:
        found = self.client.key_value_dir_get(self._diagnoses)
        return found[0][1] if found else ""

    @property
    def _beats(self) -> str:
        return f"{_WATCHDOGS}{self.number}/beats/"

    @property
    def _diagnoses(self) -> str:
        return f"{_WATCHDOGS}{self.number}/diagnoses/"

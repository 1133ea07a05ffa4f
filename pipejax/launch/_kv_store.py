"""Entries that the watchdogs of a job share in the key-value store of JAX's runtime.

Every process posts a `ProcessReport` twice a second. A diagnosis is a text that
names the process at fault.
"""

import dataclasses
from typing import Any

from ._diagnose import ProcessReport

_WATCHDOGS = "pipejax/watchdogs/"  # the folder of all keys below


@dataclasses.dataclass(frozen=True)
class KeyValueStore:
    """One process's access to the reports and diagnoses of its job.

    If process 0 cannot be reached, the methods raise an exception, or block for
    minutes.
    """

    client: Any
    # The index of the watchdog among those that the program opens in turn. A store
    # shows only what stores of the same number have written.
    number: int = 0

    @classmethod
    def opened(cls, client: Any, rank: int) -> "KeyValueStore":
        """Opens a store whose number this process has not used yet."""
        folder = f"{_WATCHDOGS}of/{rank}/"
        number = len(client.key_value_dir_get(folder))
        client.key_value_set(f"{folder}{number}", "", allow_overwrite=True)
        return cls(client, number)

    def post(self, report: ProcessReport) -> None:
        self._set(f"reports/{report.rank}/last", report.to_json())

    def reports(self, rank: int | None = None) -> list[ProcessReport]:
        """Returns the last report of every process, or only that of process `rank`."""
        # The slash keeps the keys of process 1 apart from those of process 11.
        found = self._get("reports/" if rank is None else f"reports/{rank}/")
        return [ProcessReport.from_json(text) for text in found]

    def publish(self, rank: int, diagnosis: str) -> None:
        """Publishes the diagnosis that process `rank` has made for all processes."""
        self._set(f"diagnoses/{rank}", diagnosis)

    def diagnosis(self) -> str:
        return next(iter(self._get("diagnoses/")), "")

    def _set(self, name: str, text: str) -> None:
        key = f"{_WATCHDOGS}{self.number}/{name}"
        self.client.key_value_set(key, text, allow_overwrite=True)

    def _get(self, folder: str) -> list[str]:
        found = self.client.key_value_dir_get(f"{_WATCHDOGS}{self.number}/{folder}")
        return [text for _, text in found]

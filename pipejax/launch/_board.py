"""Where processes leave word for one another: the key-value store of JAX's runtime."""

import dataclasses
from typing import Any

from ._judge import Beat

_WATCHDOGS = "pipejax/watchdogs/"  # a folder: all keys below


@dataclasses.dataclass(frozen=True)
class Board:
    """What one process writes and all can read.

    Its methods raise, or do not return for minutes, where process 0 cannot be reached:
    the store is there.

    Attributes:
      client: of JAX's distributed runtime.
      number: of the watchdogs that a program has one after another.
    """

    client: Any
    number: int = 0

    @classmethod
    def opened(cls, client: Any, rank: int) -> "Board":
        """A new one, behind those that this process has had."""
        folder = f"{_WATCHDOGS}of/{rank}/"
        number = len(client.key_value_dir_get(folder))
        client.key_value_set(f"{folder}{number}", "", allow_overwrite=True)
        return cls(client, number)

    def post(self, beat: Beat) -> None:
        """In place of the process's last."""
        name = f"{self._beats}{beat.rank}/last"
        self.client.key_value_set(name, beat.to_json(), allow_overwrite=True)

    def beats(self, rank: int | None = None) -> list[Beat]:
        """The last of every process, or of one."""
        folder = self._beats if rank is None else f"{self._beats}{rank}/"
        found = self.client.key_value_dir_get(folder)
        return [Beat.from_json(text) for _, text in found]

    def condemn(self, rank: int, verdict: str) -> None:
        """Tells all processes what `rank` has found wrong."""
        name = f"{self._verdicts}{rank}"
        self.client.key_value_set(name, verdict, allow_overwrite=True)

    def verdict(self) -> str:
        """What was found wrong; empty if nothing was."""
        found = self.client.key_value_dir_get(self._verdicts)
        return found[0][1] if found else ""

    @property
    def _beats(self) -> str:
        return f"{_WATCHDOGS}{self.number}/beats/"

    @property
    def _verdicts(self) -> str:
        return f"{_WATCHDOGS}{self.number}/verdicts/"

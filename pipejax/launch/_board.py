"""Where processes leave word for one another: the key-value store of JAX's runtime."""

import dataclasses
from typing import Any

from ._judge import Beat

_BEATS, _VERDICTS = "pipejax/beats/", "pipejax/verdicts/"  # folders: all keys below


@dataclasses.dataclass(frozen=True)
class Board:
    """What one process writes and all can read.

    Its methods raise, or do not return for minutes, where process 0 cannot be reached:
    the store is there.

    Attributes:
      client: of JAX's distributed runtime.
    """

    client: Any

    def post(self, beat: Beat) -> None:
        """In place of the process's last."""
        name = f"{_BEATS}{beat.rank}/last"
        self.client.key_value_set(name, beat.to_json(), allow_overwrite=True)

    def beats(self, rank: int | None = None) -> list[Beat]:
        """The last of every process, or of one."""
        folder = _BEATS if rank is None else f"{_BEATS}{rank}/"
        found = self.client.key_value_dir_get(folder)
        return [Beat.from_json(text) for _, text in found]

    def condemn(self, rank: int, verdict: str) -> None:
        """Tells all processes what `rank` has found wrong."""
        name = f"{_VERDICTS}{rank}"
        self.client.key_value_set(name, verdict, allow_overwrite=True)

    def verdict(self) -> str:
        """What was found wrong; empty if nothing was."""
        found = self.client.key_value_dir_get(_VERDICTS)
        return found[0][1] if found else ""

"""Messages between the processes of a job about their snapshots.

Process 0 says at each point whether all copy, and in how many steps the next point is.
Each process says when its part is complete, and when it has copied those of others.
"""

import dataclasses
import json
import time
from typing import Any, NamedTuple

import jax

from pipejax._internal.key_value_client import key_value_client

_PATIENCE = 600.0  # seconds to wait for a message
_FOLDER = "pipejax/snapshots"


class Point(NamedTuple):
    """A decision of process 0.

    Attributes:
      copy: Whether all processes copy their blocks now.
      steps: The number of steps until the next decision.
      stop: Why there are no more snapshots, or an empty text.
    """

    copy: bool
    steps: int
    stop: str = ""


class Outcome(NamedTuple):
    """The outcome of a snapshot for one process.

    Attributes:
      stops: The seconds for which it has stopped the training.
      beside: The seconds after that until everything was complete.
      failed: Why it is not complete, or an empty text.
      state: The digest of what must be the same on all processes.
    """

    stops: float
    beside: float
    failed: str = ""
    state: str = ""


@dataclasses.dataclass(frozen=True)
class Messages:
    """The messages of one opened manager, in the key-value store of JAX's runtime."""

    token: str  # drawn by process 0
    rank: int
    processes: int
    store: Any = dataclasses.field(
        default_factory=lambda: key_value_client() or _OwnStore()
    )

    def decide(self, number: int, point: Point) -> None:
        """Tells all processes the decision at a point; for process 0."""
        self._set(f"points/{number}", json.dumps(point))

    def decision(self, number: int) -> Point:
        """Waits for the decision at a point, however long process 0 does other work."""
        while True:
            try:
                return Point(*json.loads(self._get(f"points/{number}")))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def complete(self, number: int, name: str) -> None:
        """Says that the part of this process is complete, in the file of a name."""
        self._set(f"complete/{number}/{self.rank}", name)

    def completed(self, number: int, rank: int) -> str:
        """Waits until the part of a process is complete, and returns its file."""
        return self._get(f"complete/{number}/{rank}")

    def end(self, number: int, outcome: Outcome) -> None:
        """Says that this process is done with a snapshot."""
        self._set(f"outcomes/{number}/{self.rank}", json.dumps(outcome))

    def outcome(self, number: int, rank: int) -> Outcome:
        """Waits for the outcome of a process."""
        return Outcome(*json.loads(self._get(f"outcomes/{number}/{rank}")))

    def outcomes(self, number: int) -> list[Outcome]:
        """Waits for the outcomes of all processes."""
        return [self.outcome(number, rank) for rank in range(self.processes)]

    def all_leave(self, seconds: float) -> bool:
        """Says that this process needs nothing more; returns whether all say so.

        It waits no longer than some seconds for them.
        """
        self._set(f"leave/{self.rank}", "")
        until = time.monotonic() + seconds
        try:
            for rank in range(self.processes):
                self._get(f"leave/{rank}", max(0.1, until - time.monotonic()))
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def forget(self, number: int) -> None:
        """Removes what was said about an earlier snapshot; for process 0."""
        for folder in ("complete", "outcomes"):
            self.store.key_value_delete(f"{self._folder()}/{folder}/{number}/")

    def _set(self, name: str, text: str) -> None:
        self.store.key_value_set(f"{self._folder()}/{name}", text)

    def _get(self, name: str, seconds: float = _PATIENCE) -> str:
        key = f"{self._folder()}/{name}"
        return str(self.store.blocking_key_value_get(key, int(1000 * seconds)))

    def _folder(self) -> str:
        return f"{_FOLDER}/{self.token}"


class _OwnStore:
    """Stands for the store in a process that has not joined others."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def key_value_set(self, key: str, text: str) -> None:
        self._texts[key] = text

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        del milliseconds
        return self._texts[key]

    def key_value_delete(self, folder: str) -> None:
        for key in [key for key in self._texts if key.startswith(folder)]:
            del self._texts[key]

"""Collects the records of all processes that connect to process 0, in any order.

Process 0 greets each connection, so that a process can tell it from another program at
the same port. One thread serves all connections at once, so that a slow or silent one
delays no other. A process that dies may be started again and connect once more.
"""

import contextlib
import functools
import logging
import selectors
import socket
import time
from typing import NamedTuple

from ._record import Record

_log = logging.getLogger("pipejax")

GREETING = b"pipejax\n"
"""The line that process 0 sends first on every connection."""
LONGEST = 2**22
"""The longest line that a process reads from a connection, in bytes."""
PATIENCE = 5.0
"""Seconds within which a line must come once there is a connection."""
_REPORT = 15.0
"""Seconds between two log messages of process 0 about how many have connected."""


class Visitor(NamedTuple):
    """A connection that has not sent its whole record yet.

    Attributes:
      line: The bytes received so far.
      since: The time of `time.monotonic()` at which the connection was accepted.
    """

    line: bytearray
    since: float


class Enrolment:
    """The connections to process 0, each of which is to send one record.

    Attributes:
      came: The records of the processes that wait for an answer, by connection.
      left: The records of processes that have disconnected since they sent it, by rank.

    Args:
      server: The socket at which process 0 listens.
    """

    def __init__(self, server: socket.socket) -> None:
        self.came: dict[socket.socket, Record] = {}
        self.left: dict[int, Record] = {}
        self._visitors: dict[socket.socket, Visitor] = {}  # oldest first
        self._server = server
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, self._accept)

    def __enter__(self) -> "Enrolment":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._visitors.keys() | self.came.keys():
            connection.close()
        self._selector.close()

    def wait(self, others: int, until: float) -> None:
        """Waits until all other processes have sent their records, or time is up.

        Args:
          others: The number of other processes.
          until: The time of `time.monotonic()` at which to return in any case.
        """
        reported = time.monotonic()
        while (now := time.monotonic()) < until:
            # Once all have come, only read what has arrived: a process may have left.
            complete = len(self.came) >= others
            heard = self._selector.select(0.0 if complete else min(until - now, 1.0))
            if complete and not heard:
                return
            for key, _ in heard:
                key.data()
            self._refuse_silent()
            if time.monotonic() - reported > _REPORT:
                _log.info(
                    "%d of %d other processes have connected", len(self.came), others
                )
                reported = time.monotonic()

    def _accept(self) -> None:
        """Accepts a connection and greets it."""
        try:
            connection, _ = self._server.accept()
        except OSError as error:  # the client has gone, or too many files are open
            _log.warning("a connection could not be accepted: %s", error)
            if self._visitors:
                self._refuse(next(iter(self._visitors)), "too many connections")
            else:
                time.sleep(0.1)
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the client has gone: `_hear` handles it
            connection.send(GREETING)
        hear = functools.partial(self._hear, connection)
        self._selector.register(connection, selectors.EVENT_READ, hear)
        self._visitors[connection] = Visitor(bytearray(), time.monotonic())

    def _hear(self, connection: socket.socket) -> None:
        """Reads what a connection has sent, or notices that it has ended."""
        part, why = b"", "the connection has ended"
        try:
            part = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            why = str(error)
        if connection in self.came:
            if not part:
                record = self.came.pop(connection)
                self.left[record.rank] = record
                self._drop(connection)
        elif connection in self._visitors:  # it may have been refused meanwhile
            self._read(connection, part, why)

    def _read(self, connection: socket.socket, part: bytes, why: str) -> None:
        """Takes a part of a record, and accepts or refuses the whole record."""
        line = self._visitors[connection].line
        line += part
        if not part or len(line) > LONGEST:
            self._refuse(connection, "the line is too long" if part else why)
        elif line.endswith(b"\n"):
            try:
                self.came[connection] = Record.from_json(bytes(line))
            except ValueError as error:
                self._refuse(connection, str(error))
            else:
                del self._visitors[connection]

    def _refuse_silent(self) -> None:
        """Refuses connections that have not sent their line in time."""
        since = time.monotonic() - PATIENCE
        for connection, visitor in list(self._visitors.items()):
            if visitor.since < since:
                self._refuse(connection, f"it sent no line within {PATIENCE:g} s")

    def _refuse(self, connection: socket.socket, why: str) -> None:
        _log.warning(
            "refused a connection that no process of this job has made: %s", why
        )
        del self._visitors[connection]
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

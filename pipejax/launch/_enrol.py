"""Who comes to process 0, in whatever order; the slow, the silent and strangers beside.

Each is greeted, by which it knows process 0 from another program at that port. One
thread hears all connections at once: nobody waits for somebody else's line. Who leaves
again, for it has died, may come again.
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
"""What process 0 says first."""
LONGEST = 2**22
"""Bytes of a line."""
PATIENCE = 5.0
"""Seconds that a line may take once there is a connection."""
_REPORT = 15.0
"""Seconds after which process 0 says again how many have come."""


class Visitor(NamedTuple):
    """Someone who has not yet said what it is."""

    line: bytearray
    since: float


class Enrolment:
    """Connections to a server, each of which is to say one line.

    Attributes:
      came: who has said what it is, and waits for an answer.
      left: by rank, who had, and has gone since.
    """

    def __init__(self, server: socket.socket) -> None:
        self.came: dict[socket.socket, Record] = {}
        self.left: dict[int, Record] = {}
        self._visitors: dict[socket.socket, Visitor] = {}  # the oldest first
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
        """Returns once so many have come, or at that time."""
        reported = time.monotonic()
        while (now := time.monotonic()) < until:
            # Once all are there, only what is to be heard already: one may have left.
            complete = len(self.came) >= others
            heard = self._selector.select(0.0 if complete else min(until - now, 1.0))
            if complete and not heard:
                return
            for key, _ in heard:
                key.data()
            self._refuse_silent()
            if time.monotonic() - reported > _REPORT:
                _log.info("%d of %d others have come", len(self.came), others)
                reported = time.monotonic()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:  # who knocked has gone, or there are too many
            _log.warning("someone could not be let in: %s", error)
            if self._visitors:
                self._refuse(next(iter(self._visitors)), "too many at once")
            else:
                time.sleep(0.1)
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has left again: `_hear` sees that
            connection.send(GREETING)
        hear = functools.partial(self._hear, connection)
        self._selector.register(connection, selectors.EVENT_READ, hear)
        self._visitors[connection] = Visitor(bytearray(), time.monotonic())

    def _hear(self, connection: socket.socket) -> None:
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
        elif connection in self._visitors:  # and not refused since it spoke
            self._read(connection, part, why)

    def _read(self, connection: socket.socket, part: bytes, why: str) -> None:
        line = self._visitors[connection].line
        line += part
        if not part or len(line) > LONGEST:
            self._refuse(connection, "too long a line" if part else why)
        elif line.endswith(b"\n"):
            try:
                self.came[connection] = Record.from_json(bytes(line))
            except ValueError as error:
                self._refuse(connection, str(error))
            else:
                del self._visitors[connection]

    def _refuse_silent(self) -> None:
        since = time.monotonic() - PATIENCE
        for connection, visitor in list(self._visitors.items()):
            if visitor.since < since:
                self._refuse(connection, "it says nothing")

    def _refuse(self, connection: socket.socket, why: str) -> None:
        _log.warning("someone who is no process of this job came: %s", why)
        del self._visitors[connection]
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

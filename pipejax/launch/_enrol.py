"""Who comes to process 0, in whatever order; the slow, the silent and strangers beside.

One thread hears all connections at once: nobody waits for somebody else's line. Who
leaves again, for it has died, may come again.
"""

import logging
import selectors
import socket
import time

from ._record import Record

_log = logging.getLogger("pipejax")

LONGEST = 2**22
"""Bytes of a line."""
_REPORT = 15.0
"""Seconds without anyone after which process 0 says whom it is waiting for."""


class Enrolment:
    """Connections to a server, each of which is to say one line.

    Attributes:
      came: who has said what it is, and waits for an answer.
      left: who had, and has gone since.
    """

    def __init__(self, server: socket.socket) -> None:
        self.came: dict[socket.socket, Record] = {}
        self.left: list[Record] = []
        self._lines: dict[socket.socket, bytearray] = {}
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "Enrolment":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._lines.keys() | self.came.keys():
            connection.close()
        self._selector.close()

    def wait(self, others: int, until: float) -> None:
        """Returns once so many have come, or at that time."""
        reported = time.monotonic()
        while (left := until - time.monotonic()) > 0:
            # Once all are there, only what is to be heard already: one may have left.
            complete = len(self.came) >= others
            heard = self._selector.select(0.0 if complete else min(left, _REPORT))
            if complete and not heard:
                return
            for key, _ in heard:
                self._hear(key.fileobj)  # type: ignore[arg-type]
            if time.monotonic() - reported > _REPORT:
                _log.info("%d of %d others have come", len(self.came), others)
                reported = time.monotonic()

    def _hear(self, connection: socket.socket) -> None:
        if connection is self._server:
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._lines[connection] = bytearray()
            return
        try:
            part = connection.recv(65536)
        except OSError as error:  # it was reset
            part, why = b"", str(error)
        else:
            why = "the connection has ended"
        if connection in self.came:
            self.left.append(self.came.pop(connection))
            self._drop(connection)
            return
        line = self._lines[connection]
        line += part
        if not part or len(line) > LONGEST:
            self._refuse(connection, why if not part else "too long a line")
        elif line.endswith(b"\n"):
            try:
                self.came[connection] = Record.from_json(bytes(line))
            except ValueError as error:
                self._refuse(connection, str(error))
            else:
                del self._lines[connection]

    def _refuse(self, connection: socket.socket, why: str) -> None:
        _log.warning("someone who is no process of this job came: %s", why)
        del self._lines[connection]
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

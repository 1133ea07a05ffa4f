"""Collects the records of all processes that connect to process 0, in any order.

Process 0 greets each connection, so that a process can tell it from another program at
the same port. Both ends then prove that they know the secret of the job, before the
process sends its record. One thread serves all connections at once, so that a slow or
silent one delays no other. A process that dies may be started again and connect once
more.

In a job without a secret, a stranger that knows the protocol can send a record. A
record is *doubtful* if it comes from an address of its own and contradicts the others:
its number of processes is another one, its rank is impossible, or another address has
sent a record of the same rank. Doubtful records do not end the roll call before its
time is up.
"""

import contextlib
import dataclasses
import functools
import logging
import selectors
import socket
import time
from collections import defaultdict

from pipejax._internal import proofs

from ._record import Record

_log = logging.getLogger("pipejax")

GREETING = b"pipejax "  # begins the line that process 0 sends first
REFUSED = b"refused\n"  # the answer of process 0 to another secret
SHORT = 256  # the longest line of a connection that has not proved itself, in bytes
LONGEST = 2**20  # the longest line that a process reads from a connection, in bytes
UNFINISHED = 2**24  # the most bytes of unfinished lines that process 0 keeps
STRANGERS = 128  # the most connections that process 0 keeps beside those of its job
PATIENCE = 5.0  # seconds within which each line must come once there is a connection
_REPORT = 15.0  # seconds between two log messages about how many have connected
_SAID = 20  # the most log messages about strangers


@dataclasses.dataclass
class Visitor:
    """A connection that has not sent its whole record yet."""

    address: str
    drawn: str  # the number that process 0 has drawn for this connection
    since: float  # the time of `time.monotonic()` since which a line is awaited
    proven: bool = False  # whether the other end has proved that it knows the secret
    line: bytearray = dataclasses.field(default_factory=bytearray)


class Enrolment:
    """The connections to process 0, each of which is to send one record.

    Attributes:
      came: The records of the processes that wait for an answer, by connection.
      left: The records of processes that have disconnected since, by rank.
    """

    def __init__(
        self, server: socket.socket, processes: int, secret: bytes = b""
    ) -> None:
        self.came: dict[socket.socket, Record] = {}
        self.left: dict[int, Record] = {}
        self._addresses: dict[socket.socket, str] = {}  # of those in `came`
        self._visitors: dict[socket.socket, Visitor] = {}  # oldest first
        self._processes, self._secret = processes, secret
        self._refused = 0
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

    def release(self) -> dict[int, socket.socket]:
        """Returns the connections of the processes, by rank, which then stay open."""
        released = {record.rank: each for each, record in self.came.items()}
        self.came = {}
        return released

    def wait(self, until: float) -> None:
        """Waits until all other processes have sent their records, or time is up."""
        reported = time.monotonic()
        while (now := time.monotonic()) < until:
            # Once all have come, only read what has arrived: a process may have left.
            complete = self._complete()
            heard = self._selector.select(0.0 if complete else min(until - now, 1.0))
            if complete and not heard:
                # The records of all processes are here, so doubtful ones are those of
                # strangers.
                for connection in self._doubtful():
                    self._forget(connection)
                return
            for key, _ in heard:
                key.data()
            self._refuse_silent()
            if time.monotonic() - reported > _REPORT:
                said = "%d of %d other processes have connected"
                _log.info(said, len(self.came), self._processes - 1)
                reported = time.monotonic()

    def _complete(self) -> bool:
        if len(self.came) < self._processes - 1:
            return False
        if self._secret:
            return True
        if any(len(where) > 1 for where in self._places().values()):
            return False  # two addresses claim one rank, and one may be a stranger's
        return len(self.came) - len(self._doubtful()) >= self._processes - 1

    def _places(self) -> dict[int, set[str]]:
        """Returns the addresses from which each possible rank has come."""
        places: dict[int, set[str]] = defaultdict(set)
        for connection, record in self.came.items():
            if self._possible(record):
                places[record.rank].add(self._addresses[connection])
        return places

    def _doubtful(self) -> list[socket.socket]:
        """Returns connections with impossible records from addresses of their own."""
        if self._secret:
            return []
        known = set().union(*self._places().values())
        return [
            connection
            for connection, record in self.came.items()
            if not self._possible(record) and self._addresses[connection] not in known
        ]

    def _possible(self, record: Record) -> bool:
        same = record.processes == self._processes
        return same and 0 <= record.rank < self._processes

    def _accept(self) -> None:
        try:
            connection, address = self._server.accept()
        except OSError as error:  # the client has gone, or too many files are open
            self._say("a connection could not be accepted: %s", error)
            if self._visitors:
                self._refuse(self._oldest(), "too many connections")
            else:
                time.sleep(0.1)
            return
        connection.setblocking(False)
        visitor = Visitor(str(address[0]), proofs.drawn(), time.monotonic())
        with contextlib.suppress(OSError):  # the client has gone: `_hear` handles it
            connection.send(GREETING + visitor.drawn.encode() + b"\n")
        hear = functools.partial(self._hear, connection)
        self._selector.register(connection, selectors.EVENT_READ, hear)
        self._visitors[connection] = visitor
        if len(self._visitors) > self._processes + STRANGERS:
            self._refuse(self._oldest(), "too many connections")

    def _oldest(self) -> socket.socket:
        """Returns the oldest connection, if possible one that has not proved itself."""
        unproven = (c for c, visitor in self._visitors.items() if not visitor.proven)
        return next(unproven, next(iter(self._visitors)))

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
                record = self._forget(connection)
                if self._possible(record):
                    self.left[record.rank] = record
        elif connection in self._visitors:  # it may have been refused meanwhile
            self._read(connection, part, why)

    def _read(self, connection: socket.socket, part: bytes, why: str) -> None:
        visitor = self._visitors[connection]
        visitor.line += part
        longest = LONGEST if visitor.proven else SHORT
        if not part or len(visitor.line) > longest:
            self._refuse(connection, "the line is too long" if part else why)
        elif visitor.line.endswith(b"\n"):
            try:
                if visitor.proven:
                    self._enrol(connection, visitor)
                else:
                    self._prove(connection, visitor)
            except (OSError, ValueError) as error:
                self._refuse(connection, str(error))
        elif sum(len(each.line) for each in self._visitors.values()) > UNFINISHED:
            largest = max(self._visitors, key=lambda c: len(self._visitors[c].line))
            self._refuse(largest, "too many unfinished lines")

    def _prove(self, connection: socket.socket, visitor: Visitor) -> None:
        drawn, _, given = visitor.line.decode("ascii").strip().partition(" ")
        role = proofs.REPORTS
        if not proofs.proves(given, self._secret, role, drawn, visitor.drawn):
            connection.send(REFUSED)
            raise ValueError(f"it does not know the secret, {proofs.VARIABLE}")
        own = proofs.proof(self._secret, proofs.LISTENS, visitor.drawn, drawn)
        connection.send(own.encode() + b"\n")
        visitor.proven, visitor.since = True, time.monotonic()
        visitor.line = bytearray()

    def _enrol(self, connection: socket.socket, visitor: Visitor) -> None:
        record = Record.from_json(bytes(visitor.line))
        if len(self.came) >= self._processes + STRANGERS:
            raise ValueError("too many records")
        self.came[connection] = record
        self._addresses[connection] = visitor.address
        del self._visitors[connection]

    def _refuse_silent(self) -> None:
        since = time.monotonic() - PATIENCE
        for connection, visitor in list(self._visitors.items()):
            if visitor.since < since:
                self._refuse(connection, f"it sent no line within {PATIENCE:g} s")

    def _refuse(self, connection: socket.socket, why: str) -> None:
        self._say("refused a connection that no process of this job has made: %s", why)
        del self._visitors[connection]
        self._drop(connection)

    def _say(self, message: str, why: object) -> None:
        self._refused += 1
        if self._refused <= _SAID:
            _log.warning(message, why)
        if self._refused == _SAID:
            _log.warning("further strangers are refused without a message")

    def _forget(self, connection: socket.socket) -> Record:
        del self._addresses[connection]
        self._drop(connection)
        return self.came.pop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

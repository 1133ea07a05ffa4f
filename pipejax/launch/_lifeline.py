"""Lifelines: connections by which process 0 notices that another process has ended.

However a process ends, the kernel closes its connections at once. A watchdog therefore
needs only a short silence of a process whose lifeline has closed, where it would
otherwise have to wait for its whole limit.

A closed lifeline alone says little, because a network device may close a connection
that nobody uses. A process whose lifeline was closed by others opens it again.

A lifeline carries nothing but the rank of its process, as a line, when it is opened.
"""

import contextlib
import logging
import socket
from typing import Protocol

from ._board import Board

_log = logging.getLogger("pipejax")

_STRANGERS = 64
"""The most connections without a rank that process 0 keeps, beside one per process."""
_OF_ONE_RANK = 4
"""The most connections that process 0 keeps of one rank, the newest of them."""
_LONGEST = 16
"""The longest line with a rank, in bytes."""
_PATIENCE = 2.0
"""Seconds within which a connection must be made. No beat is sent meanwhile."""


class Ends(Protocol):
    """The ends of lifelines in one process."""

    def tend(self, board: Board) -> set[int]:
        """Does what is due once a second, and returns the ranks of closed lifelines."""

    def close(self) -> None:
        """Closes all connections of this process."""


def opened(host: str | None, rank: int, processes: int) -> Ends:
    """Returns the ends of lifelines of this process, or none if it cannot have any."""
    if host is not None and rank:
        return Lifeline(host, rank)
    if host is not None:
        try:
            return Lifelines(processes)
        except OSError as error:
            _log.warning("the watchdog has no lifelines: %s", error)
    return _NoLifelines()


class _NoLifelines:
    def tend(self, board: Board) -> set[int]:
        del board
        return set()

    def close(self) -> None:
        pass


class Lifelines:
    """The ends of all lifelines at process 0."""

    def __init__(self, processes: int) -> None:
        self._processes, self._offered = processes, False
        self._unnamed: dict[socket.socket, bytes] = {}
        self._named: dict[int, list[socket.socket]] = {}
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=1024
        )
        self._server.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def tend(self, board: Board) -> set[int]:
        if not self._offered:
            board.offer(self.port)
            self._offered = True
        return self.closed()

    def closed(self) -> set[int]:
        """Accepts new connections, and returns the ranks whose lifelines have ended."""
        most = self._processes + _STRANGERS
        with contextlib.suppress(OSError):  # nobody else has connected
            for _ in range(most):  # more may wait until the next call
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._unnamed[connection] = b""
        for connection in list(self._unnamed):
            self._name(connection)
        for connection in [*self._unnamed][:-most]:  # the oldest
            del self._unnamed[connection]
            connection.close()
        for rank, connections in self._named.items():
            self._named[rank] = [each for each in connections if not _ended(each)]
        return {rank for rank, open_ones in self._named.items() if not open_ones}

    def close(self) -> None:
        for connections in (self._unnamed, *self._named.values()):
            for connection in connections:
                connection.close()
        self._server.close()

    def _name(self, connection: socket.socket) -> None:
        """Reads the rank that a connection sends, or drops a connection without one."""
        try:
            part = connection.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        line = self._unnamed.pop(connection) + part
        whole = line.endswith(b"\n")
        if whole and line.strip().isdigit() and int(line) < self._processes:
            # A lifeline may be opened again before its old end is known to have closed.
            of_rank = self._named.setdefault(int(line), [])
            of_rank.append(connection)
            if len(of_rank) > _OF_ONE_RANK:
                of_rank.pop(0).close()
        elif whole or not part or len(line) >= _LONGEST:
            connection.close()
        else:
            self._unnamed[connection] = line


class Lifeline:
    """The end of a lifeline at a process other than process 0."""

    def __init__(self, host: str, rank: int) -> None:
        self._host, self._rank = host, rank
        self._connection: socket.socket | None = None
        self._given_up = False

    def tend(self, board: Board) -> set[int]:
        """Opens the lifeline if it is not open, once process 0 has offered a port."""
        if self._connection is None or _ended(self._connection):
            self._connection = None
            port = None if self._given_up else board.offered()
            if port is not None:
                self._open(port)
        return set()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _open(self, port: int) -> None:
        try:
            connection = socket.create_connection((self._host, port), _PATIENCE)
        except OSError:
            # A firewall may drop what is sent to this port. Another attempt would delay
            # the beats by `_PATIENCE` each time, and a watchdog also works without
            # lifelines.
            self._given_up = True
            return
        with contextlib.suppress(OSError):  # process 0 has closed it: try once more
            connection.sendall(f"{self._rank}\n".encode())
        connection.setblocking(False)
        self._connection = connection


def _ended(connection: socket.socket) -> bool:
    """Returns whether the other end has closed a connection; closes this end too."""
    try:
        if connection.recv(_LONGEST):
            return False
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True

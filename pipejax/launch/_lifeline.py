"""Lifelines: connections by which process 0 notices that another process has ended.

However a process ends, the kernel closes its connections at once. A watchdog therefore
needs only a short silence of a process whose lifeline has closed, where it would
otherwise have to wait for its whole limit.

A closed lifeline alone says little, because a network device may close a connection
that nobody uses. A process whose lifeline was closed by others opens it again.

A lifeline carries nothing but the rank of its process, as a line, when it is opened.
"""

import contextlib
import socket
from collections.abc import Callable

_STRANGERS = 64
"""The most connections without a rank that process 0 keeps, beside one per process."""
_OF_ONE_RANK = 4
"""The most connections that process 0 keeps of one rank, the newest of them."""
_LONGEST = 16
"""The longest line with a rank, in bytes."""
_PATIENCE = 2.0
"""Seconds within which a connection must be made. No beat is sent meanwhile."""


class Lifelines:
    """The ends of all lifelines at process 0.

    Args:
      processes: The number of processes in the job.

    Raises:
      OSError: If this process cannot listen at a port.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
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
        """Returns the port at which process 0 listens, which the system has chosen."""
        return int(self._server.getsockname()[1])

    def closed(self) -> set[int]:
        """Returns the ranks of processes that had a lifeline and have none now."""
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
        """Closes all connections, and listens no longer."""
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
            of_rank = self._named.setdefault(int(line), [])
            of_rank.append(connection)
            if len(of_rank) > _OF_ONE_RANK:
                of_rank.pop(0).close()
        elif whole or not part or len(line) >= _LONGEST:
            connection.close()
        else:
            self._unnamed[connection] = line


class Lifeline:
    """The end of a lifeline at a process other than process 0.

    A watchdog also works without lifelines. If process 0 cannot be reached at its port,
    for example because of a firewall, no other attempt is made.

    Args:
      host: The host of process 0.
      rank: The rank of this process.
    """

    def __init__(self, host: str, rank: int) -> None:
        self._host, self._rank = host, rank
        self._connection: socket.socket | None = None
        self._given_up = False

    def keep(self, port: Callable[[], int | None]) -> None:
        """Opens the lifeline if it is not open.

        Args:
          port: A function that returns the port of process 0, or `None` as long as it
            is unknown. It is called only if the lifeline is not open.
        """
        if self._connection is not None and not _ended(self._connection):
            return
        self._connection = None
        if self._given_up or (number := port()) is None:
            return
        try:
            connection = socket.create_connection((self._host, number), _PATIENCE)
        except OSError:
            self._given_up = True
            return
        with contextlib.suppress(OSError):  # process 0 has closed it: try once more
            connection.sendall(f"{self._rank}\n".encode())
        connection.setblocking(False)
        self._connection = connection

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()


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

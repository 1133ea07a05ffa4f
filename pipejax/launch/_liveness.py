"""Notices that another process has ended, by the connection that it leaves behind.

However a process ends, the kernel closes its connections at once. A watchdog therefore
needs only a short silence of a process whose connection has closed, where it would
otherwise have to wait for its whole limit. The connections are those of the roll call,
which `initialize` keeps open.

A closed connection alone says little, because a network device may close a connection
that nobody uses.
"""

import socket
from collections.abc import Mapping

_kept: dict[int, socket.socket] = {}


def keep(connections: Mapping[int, socket.socket]) -> None:
    """Keeps connections to other processes open, by rank, as long as this one lives."""
    for connection in connections.values():
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _kept.update(connections)


def closed() -> set[int]:
    """Returns the ranks of the processes whose connections have closed."""
    return {rank for rank, connection in _kept.items() if _is_closed(connection)}


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)  # nobody sends anything after the roll call
    except BlockingIOError:
        return False
    except OSError:
        return True

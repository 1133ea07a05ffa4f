"""Notices that another process has ended, by the connection that it leaves behind.

However a process ends, the kernel closes its connections at once. The connections are
those of the roll call, which `initialize` keeps open between process 0 and each other.

A closed connection alone says little, because a network device may close a connection
that nobody uses. The kernel therefore probes each of them twice a minute. A process
that lives notices too that its connection has closed, and says so at once. A connection
that the network has lost says nothing about its process, and is left out.

Process 0 sends its diagnosis over them, which every other process then has at once.
"""

import contextlib
import socket
from collections.abc import Mapping

from pipejax._internal.forks import closed_in_children

# Seconds without traffic until a probe, and between probes; probes until one gives up.
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 10}

_END = b"\0"  # ends a text

# The connections of this process to those of its job, by rank. It has one job only.
_kept: dict[int, socket.socket] = {}
_said: dict[int, bytearray] = {}  # what they have sent
_closed: set[int] = set()


def keep(connections: Mapping[int, socket.socket]) -> None:
    """Keeps connections to other processes open, by rank, as long as this one lives."""
    for connection in connections.values():
        connection.setblocking(False)
        closed_in_children(connection)
        # Some systems refuse options where the other end is closed already.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name) and connection.family != socket.AF_UNIX:
                    option = getattr(socket, name)
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
    _kept.update(connections)


def closed() -> set[int]:
    """Reads all connections; returns the ranks of those that have closed."""
    for rank in list(_kept):
        _read(rank)
    return {*_closed}


def leave_out(ranks: set[int]) -> None:
    """Counts connections to processes that are cut off or stopped as closed."""
    _closed.update(ranks & _kept.keys())


def all_closed() -> bool:
    """Returns whether there were connections, and none is open."""
    found = closed()
    return bool(found) and found >= _kept.keys()


def send(text: str) -> None:
    """Sends a text to all other processes, for process 0."""
    for connection in list(_kept.values()):
        with contextlib.suppress(OSError):  # it has ended
            connection.send(text.encode() + _END)


def received() -> str:
    """Returns the text of process 0 that `closed` has read, or an empty one."""
    text, end, _ = bytes(_said.get(0, b"")).partition(_END)
    return text.decode() if end else ""


def _read(rank: int) -> None:
    # Another job may begin, with other connections, while a thread is in here.
    kept, connection = _kept, _kept[rank]
    try:
        while part := connection.recv(65536):
            _said.setdefault(rank, bytearray()).extend(part)
        _closed.add(rank)
    except BlockingIOError:
        pass
    except OSError:  # the network has reset it, has no route, or answers no probe
        _closed.discard(rank)
        kept.pop(rank, None)
        connection.close()

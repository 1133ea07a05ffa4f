"""Notices that another process has ended, by the connection that it leaves behind.

However a process ends, the kernel closes its connections at once. A watchdog therefore
needs only a short silence of a process whose connection has closed, where it would
otherwise have to wait for its whole limit. The connections are those of the roll call,
which `initialize` keeps open.

A closed connection alone says little, because a network device may close a connection
that nobody uses. The kernel therefore probes each of them twice a minute. A connection
that the network has lost says nothing about its process, and is left out.
"""

import contextlib
import socket
from collections.abc import Mapping

# Seconds without traffic until a probe, and between probes; probes until one gives up.
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 10}

# The connections of this process to those of its job, by rank. It has one job only.
_kept: dict[int, socket.socket] = {}


def keep(connections: Mapping[int, socket.socket]) -> None:
    """Keeps connections to other processes open, by rank, as long as this one lives."""
    for connection in connections.values():
        connection.setblocking(False)
        # Some systems refuse options where the other end is closed already.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name) and connection.family != socket.AF_UNIX:
                    option = getattr(socket, name)
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
    _kept.update(connections)


def closed() -> set[int]:
    """Returns the ranks of the processes whose connections have closed."""
    return {rank for rank in list(_kept) if _is_closed(rank)}


def _is_closed(rank: int) -> bool:
    try:
        return not _kept[rank].recv(1)  # nobody sends anything after the roll call
    except BlockingIOError:
        return False
    except OSError:  # the network has reset it, has no route, or answers no probe
        _kept.pop(rank).close()
        return False

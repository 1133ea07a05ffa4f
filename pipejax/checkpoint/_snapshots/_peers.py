"""Sends the files of a job in this host's memory to its processes on other hosts.

Both ends prove that they know a secret that process 0 has drawn. Then the reader names
a file, gets its header, names blocks, and gets their bytes.
"""

import contextlib
import functools
import ipaddress
import json
import logging
import pathlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from pipejax._internal import proofs
from pipejax._internal.forks import closed_in_children

from .._fault import DamagedError
from ._blocks import Block
from ._file import Header, header_of, read, read_header, taken, text_of

_log = logging.getLogger(__name__)

_SERVES, _READS = "keeper of a snapshot", "reader of a snapshot"
_PATIENCE = 20.0  # seconds within which the other end must go on
_SHORT = 256  # the longest line of an end that has not proved itself, in bytes
_LONG = 2**30

Address = tuple[str, int]


class Server:
    """Serves the files of a folder from a thread until `close`.

    Attributes:
      port: The port at which it listens, on all addresses of this host.
    """

    def __init__(self, folder: pathlib.Path, secret: bytes) -> None:
        self._folder, self._secret = folder, secret
        both = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=128,
        )
        closed_in_children(self._socket)
        self.port: int = self._socket.getsockname()[1]
        _thread("pipejax snapshots", self._accept)

    def close(self) -> None:
        # A thread that waits in `accept` would keep the port open.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            _thread("pipejax snapshot", functools.partial(self._serve, connection))

    def _serve(self, connection: socket.socket) -> None:
        try:
            with _stream(connection) as stream:
                _prove(stream, self._secret, _SERVES, _READS)
                path = self._folder / _name(_line(stream))
                header = read_header(path)
                stream.write(text_of(header).encode() + b"\n")
                stream.flush()
                blocks = [*header.offsets]
                asked = [blocks[place] for place in json.loads(_line(stream, _LONG))]
                for _, content in read(path, header, asked):
                    stream.write(content)
        except (OSError, ValueError, EOFError, LookupError) as error:
            _log.info("a snapshot was not sent: %s", error)


@contextlib.contextmanager
def opened(
    address: Address, secret: bytes, name: str
) -> Iterator[tuple[Header, Callable[[Iterable[Block]], Iterator[Any]]]]:
    """Opens a file on another host.

    Yields its header, and a function that is to be called once: given blocks, it yields
    each with its bytes. Raises an `OSError` or an `EOFError` if the other end does not
    answer, and a `ValueError` if it has another secret or another file.
    """
    connection = socket.create_connection(address, _PATIENCE)
    with _stream(connection) as stream:
        _prove(stream, secret, _READS, _SERVES)
        stream.write(name.encode() + b"\n")
        stream.flush()
        header = header_of(_line(stream, _LONG))
        places = {block: place for place, block in enumerate(header.offsets)}

        def read(blocks: Iterable[Block]) -> Iterator[tuple[Block, np.ndarray]]:
            asked = [*blocks]
            line = json.dumps([places[each] for each in asked])
            stream.write(line.encode() + b"\n")
            stream.flush()
            for each in asked:
                yield each, taken(each.size, stream)

        yield header, read


def own_address(other: str | None) -> str:
    """Returns the address of this host at which the host of `other` reaches it.

    Args:
      other: The address of the coordinator, `host:port`, or `None` without one.
    """
    if other is None:
        return "127.0.0.1"
    host, _, port = other.rpartition(":")
    for family, kind, protocol, _, where in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    ):
        # Connecting a socket of datagrams sends nothing, and chooses the interface.
        with (
            socket.socket(family, kind, protocol) as probe,
            contextlib.suppress(OSError),
        ):
            probe.connect(where)
            return str(probe.getsockname()[0])
    return socket.gethostname()


def is_loopback(address: str) -> bool:
    """Returns whether an address reaches nothing but its own host."""
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(address).is_loopback
    return False


@contextlib.contextmanager
def _stream(connection: socket.socket) -> Iterator[Any]:
    connection.settimeout(_PATIENCE)
    with connection, connection.makefile("rwb", buffering=2**20) as stream:
        yield stream


def _prove(stream: Any, secret: bytes, role: str, other: str) -> None:
    """Proves the secret to the other end, the reader first, and checks its proof."""
    own = proofs.drawn()
    stream.write(own.encode() + b"\n")
    stream.flush()
    theirs = _line(stream)
    if role == _SERVES:
        _check(_line(stream), secret, other, theirs, own)
    stream.write(proofs.proof(secret, role, own, theirs).encode() + b"\n")
    stream.flush()
    if role == _READS:
        _check(_line(stream), secret, other, theirs, own)


def _check(given: str, secret: bytes, role: str, own: str, other: str) -> None:
    if not proofs.proves(given, secret, role, own, other):
        raise ValueError("the other end does not know the secret of this job")


def _line(stream: Any, longest: int = _SHORT) -> str:
    line = stream.readline(longest)
    if not line.endswith(b"\n"):
        raise EOFError("the connection has ended, or a line was too long")
    return str(line[:-1].decode())


def _name(text: str) -> str:
    if not text.replace("-", "").isalnum():
        raise DamagedError(f"{text!r} names no file of a snapshot")
    return text


def _thread(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()

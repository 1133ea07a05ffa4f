"""Introduces a process to process 0: connects, proves the secret, sends the record."""

import contextlib
import socket
import time

from pipejax._internal import proofs

from ._enrol import GREETING, LONGEST, PATIENCE, REFUSED, SHORT
from ._place import Place
from ._record import Record


def introduced(
    place: Place, mine: Record, until: float, secret: bytes
) -> tuple[bytes, socket.socket]:
    """Sends the record to process 0; returns its answer and the open connection.

    `until` is the time of `time.monotonic()` until which process 0 waits. Raises an
    OSError if process 0 does not answer, and a ValueError if another program, or a
    process with another secret, listens there.
    """
    host, _, port = place.coordinator.rpartition(":")
    # The kernel sends a lost request again after 1, 3, 7, 15 and 31 seconds. Where the
    # network is away for a while, new requests come sooner.
    patience = min(PATIENCE, max(0.2, until - time.monotonic()))
    with contextlib.ExitStack() as stack:
        connection = socket.create_connection((host.strip("[]"), int(port)), patience)
        stack.enter_context(connection)
        # As long as nothing listens at a port of this host, the system may choose this
        # very port for the connection, which then leads to itself.
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError("nothing listens there")
        prove(connection, secret, patience)
        connection.sendall(mine.to_json())
        # Process 0 waits as long as this process; its answer then has to arrive.
        longest = max(0.0, until - time.monotonic()) + 2 * PATIENCE
        answer = _line(connection, longest, LONGEST)
        stack.pop_all()
    return answer, connection


def prove(connection: socket.socket, secret: bytes, patience: float) -> None:
    greeting = _line(connection, patience, SHORT)
    if not greeting.startswith(GREETING):
        raise ValueError("another program listens there")
    theirs = greeting.removeprefix(GREETING).decode("ascii", "replace").strip()
    drawn = proofs.drawn()
    given = proofs.proof(secret, proofs.REPORTS, drawn, theirs)
    connection.sendall(f"{drawn} {given}\n".encode())
    answer = _line(connection, patience, SHORT)
    shown = answer.decode("ascii", "replace").strip()
    if answer == REFUSED or not proofs.proves(
        shown, secret, proofs.LISTENS, theirs, drawn
    ):
        says = f"{proofs.VARIABLE} must be the same in all processes"
        raise ValueError(f"process 0 has another secret: {says}")


def _line(connection: socket.socket, patience: float, longest: int) -> bytes:
    """Reads a line; raises a TimeoutError if it takes more than `patience` seconds."""
    until, read = time.monotonic() + patience, bytearray()
    while not read.endswith(b"\n"):
        connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(65536)
        read += part
        if not part or len(read) > longest:
            raise ValueError(
                "the connection has ended" if not part else "the line is too long"
            )
    return bytes(read)

"""Every process once, all alike, before JAX joins them.

JAX's own joining is a barrier: where a process does not come, or two come as one, it
aborts all of them after its timeout and says neither which nor where, and its key-value
store opens only behind it. So process 0 first listens itself, at the coordinator's
address, greets who comes, waits until every process has said what it is, and answers
all alike: nothing, then JAX's turn has come, or what is wrong. Each says one line of
JSON.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ._enrol import GREETING, LONGEST, PATIENCE, Enrolment
from ._place import Place
from ._record import Record, differences, parsed

_AGAIN = 0.2
"""Seconds after which an address that does not answer is tried again."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What process 0 says to all.

    Attributes:
      reasons: why they cannot begin; none if they can.
      hosts: their names, by rank; none if they cannot.
    """

    reasons: list[str]
    hosts: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> bytes:
        """One line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> "Answer":
        """What `to_json` has written; ValueError for anything else."""
        read = parsed(line)
        if read.keys() != {"reasons", "hosts"} or not all(
            isinstance(value, list) for value in read.values()
        ):
            raise ValueError("what is said there is not said by process 0")
        return cls(*(list(map(str, read[name])) for name in ("reasons", "hosts")))


class RollCallError(RuntimeError):
    """Processes that cannot train together; a line for each reason."""


def call(place: Place, mine: Record, *, bind: str, timeout: float) -> list[str]:
    """Returns once all processes are there and alike.

    Args:
      place: of this process.
      mine: its record.
      bind: `host:port` at which process 0 listens.
      timeout: seconds until those who came are told who did not.

    Returns:
      Their hosts' names, by rank.

    Raises:
      RollCallError: on every process that came, for the same reasons.
    """
    until = time.monotonic() + timeout
    if place.rank == 0:
        answer = _listen(place, mine, bind, until, timeout)
    else:
        answer = _report(place, mine, until, timeout)
    if answer.reasons:
        raise RollCallError(
            f"{place.processes} processes ({place.launcher}) cannot begin at"
            f" {place.coordinator}:"
            + "".join(f"\n- {reason}" for reason in answer.reasons)
        )
    return answer.hosts


def faults(
    records: Sequence[Record], left: Sequence[Record], timeout: float
) -> list[str]:
    """What is wrong with those who came, process 0 first, a line each.

    Args:
      records: of those who are there.
      left: of those who were.
      timeout: that all had, in seconds.
    """
    expected = records[0].processes
    came = Counter(record.rank for record in records)
    lines = [
        f"process {record} is one of {record.processes}, and process {records[0]} of"
        f" {expected}"
        for record in records
        if record.processes != expected
    ]
    for rank in (rank for rank, times in came.items() if times > 1):
        hosts = ", ".join(each.host for each in records if each.rank == rank)
        lines.append(f"process {rank} came {came[rank]} times, from {hosts}")
    missing = [str(rank) for rank in range(expected) if rank not in came]
    if missing and len(records) < expected:
        lines.append(
            f"process {', '.join(missing)} did not come within {timeout:g} s; there are"
            f" {', '.join(map(str, records))}"
        )
        lines += [
            f"process {record} came, and left again"
            for record in left
            if record.rank not in came
        ]
    return lines + differences(records)


def _listen(
    place: Place, mine: Record, bind: str, until: float, timeout: float
) -> Answer:
    try:
        server = _bound(bind, until)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _second(place, mine, bind, until)
        return Answer([_unbound(bind, mine, error)])
    with server, Enrolment(server) as enrolment:
        enrolment.wait(place.processes - 1, until)
        records = [mine, *enrolment.came.values()]
        reasons = faults(records, [*enrolment.left.values()], timeout)
        if len(records) < place.processes:
            reasons += _loopback(server.getsockname()[0], mine)
        by_rank = sorted(records, key=lambda record: record.rank)
        answer = Answer(reasons, [] if reasons else [each.host for each in by_rank])
        for connection in enrolment.came:
            connection.settimeout(PATIENCE)
            with contextlib.suppress(OSError):  # it has left since
                connection.sendall(answer.to_json())
    return answer


def _report(place: Place, mine: Record, until: float, timeout: float) -> Answer:
    """Asks until it is told: at first process 0 may be one that is about to end."""
    while True:
        try:
            return _told(place, mine, until)
        except (OSError, ValueError) as error:
            if time.monotonic() + _AGAIN < until:
                time.sleep(_AGAIN)
                continue
            untold = (
                f"process {mine} could not reach process 0 at {place.coordinator}"
                f" within {timeout:g} s ({error}): it is not there, or the job has"
                " begun without this process, or the port is another program's"
            )
            host = place.coordinator.rpartition(":")[0].strip("[]")
            return Answer([untold, *_loopback(host, mine)])


def _second(place: Place, mine: Record, bind: str, until: float) -> Answer:
    """To a process 0 whose port is taken, perhaps by another process 0 of its job."""
    try:
        return _told(place, mine, until)
    except (OSError, ValueError):
        taken = (
            f"process {mine} cannot listen at {bind}: the port is another program's,"
            " perhaps a job's that has not ended; choose another port"
        )
        return Answer([taken])


def _told(place: Place, mine: Record, until: float) -> Answer:
    """What process 0 says once it knows."""
    host, _, port = place.coordinator.rpartition(":")
    left = max(_AGAIN, until - time.monotonic())
    with socket.create_connection((host.strip("[]"), int(port)), left) as connection:
        if _line(connection, min(PATIENCE, left)) != GREETING:
            raise ValueError("another program is there")
        connection.sendall(mine.to_json())
        # It has the same limit, and then what it says takes its way.
        patience = max(0.0, until - time.monotonic()) + 2 * PATIENCE
        return Answer.from_json(_line(connection, patience))


def _bound(address: str, until: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, where = _found(host.strip("[]"), int(port), until)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(family, kind, protocol))
        # JAX's service listens at the same port as soon as this is over.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(1024)
        stack.pop_all()
    return server


def _found(host: str, port: int, until: float) -> Any:
    """Of a name; that of a pod is known only some time after it has begun."""
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror:
            if time.monotonic() + _AGAIN > until:
                raise
            time.sleep(_AGAIN)


def _unbound(bind: str, mine: Record, error: OSError) -> str:
    return (
        f"process {mine} cannot listen at {bind} ({error}): the coordinator's address"
        " must be one of process 0's own host; where others reach that under another"
        " address, say by `bind` or JAX_COORDINATOR_BIND_ADDRESS what it is to listen"
        " at, such as 0.0.0.0 and the port"
    )


def _line(connection: socket.socket, patience: float) -> bytes:
    """What comes before the end of a line.

    Raises:
      TimeoutError: where that takes longer than `patience`, in seconds.
      ValueError: where the connection ends before, or the line does not.
    """
    until, read = time.monotonic() + patience, bytearray()
    while not read.endswith(b"\n"):
        connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(65536)
        read += part
        if not part or len(read) > LONGEST:
            raise ValueError(
                "the connection has ended" if not part else "too long a line"
            )
    return bytes(read)


def _loopback(address: str, mine: Record) -> list[str]:
    """A line more where others cannot come because of where process 0 listens."""
    try:
        found = socket.getaddrinfo(address, None)[0][4][0]
    except OSError:
        return []
    if not ipaddress.ip_address(found).is_loopback:
        return []
    return [
        f"{address} is loopback on {mine.host}, which processes of other hosts do not"
        " reach: for these give an address of process 0's host in their network"
    ]

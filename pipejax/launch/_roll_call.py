"""A roll call of all processes of a job, before JAX joins them.

`jax.distributed.initialize` is a barrier. If a process does not come, or if two come
with the same rank, it aborts all processes after its timeout, and names neither the
process nor its host. Its key-value store opens only after the barrier.

So process 0 first listens at the coordinator's address itself. It waits until all
processes have sent their records, and sends the same answer to all of them. The answer
lists what is wrong. If nothing is, JAX then joins the processes.
"""

import contextlib
import dataclasses
import errno
import functools
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._enrol import PATIENCE, Enrolment
from ._introduce import introduced
from ._place import Place
from ._record import JsonLine, Record, differences

_AGAIN = 0.05  # seconds between two attempts to reach an address that does not answer


@dataclasses.dataclass(frozen=True)
class Answer(JsonLine):
    """The answer of process 0: `reasons` not to begin, or the `hosts` by rank."""

    noun = "an answer of process 0"
    reasons: list[str]
    hosts: list[str] = dataclasses.field(default_factory=list)


class Meeting(NamedTuple):
    """The hosts of all processes, and open connections, both by rank."""

    hosts: list[str]
    connections: dict[int, socket.socket]  # of process 0 to all, of others to 0


_Introduce = Callable[[], tuple[bytes, socket.socket]]
_Answered = tuple[Answer, dict[int, socket.socket]]


class RollCallError(RuntimeError):
    """Error that is raised on every process of a job which cannot begin.

    The message has a line for each reason, such as a process that has not come, or a
    setting that differs between processes.
    """


def call(
    place: Place, mine: Record, *, bind: str, timeout: float, secret: bytes = b""
) -> Meeting:
    """Waits until all processes of the job have come, and checks that they are alike.

    If a process is missing, comes twice or differs, all that have come raise a
    `RollCallError` with the same reasons. A process that cannot reach process 0 raises
    one too.
    """
    until = time.monotonic() + timeout
    introduce = functools.partial(introduced, place, mine, until, secret)
    if place.rank == 0:
        answer, connections = _listen(mine, bind, until, timeout, secret, introduce)
    else:
        answer, connections = _report(place, mine, until, timeout, introduce)
    if answer.reasons:
        for connection in connections.values():
            connection.close()
        raise RollCallError(
            f"the job of {place.processes} processes ({place.launcher}) with the"
            f" coordinator {place.coordinator} cannot begin:"
            + "".join(f"\n- {reason}" for reason in answer.reasons)
        )
    return Meeting(answer.hosts, connections)


def faults(
    records: Sequence[Record], left: Sequence[Record], timeout: float
) -> list[str]:
    """Returns a line for each fault; `records` begin with process 0."""
    expected = records[0].processes
    came = Counter(record.rank for record in records)
    lines = [
        f"every process must be given the same number of processes; process {record}"
        f" was given {record.processes}, and process {records[0]} was given {expected}"
        for record in records
        if record.processes != expected
    ]
    for rank in (rank for rank, times in came.items() if times > 1):
        hosts = ", ".join(each.host for each in records if each.rank == rank)
        lines.append(
            f"each process must have a rank of its own; {came[rank]} processes came"
            f" with rank {rank}, from {hosts}"
        )
    missing = [str(rank) for rank in range(expected) if rank not in came]
    if missing and len(records) < expected:
        noun = "process" if len(missing) == 1 else "processes"
        lines.append(
            f"{noun} {', '.join(missing)} did not come within {timeout:g} s; those that"
            f" came are {', '.join(map(str, records))}; check that every process was"
            " started and can reach process 0, or give a longer `timeout`"
        )
        lines += [
            f"process {record} came, and then disconnected; its own output may say why"
            for record in left
            if record.rank not in came
        ]
    return lines + differences(records)


def _listen(
    mine: Record,
    bind: str,
    until: float,
    timeout: float,
    secret: bytes,
    introduce: _Introduce,
) -> _Answered:
    try:
        server = _bound(bind, until)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Answer([_unbound(bind, mine, error)]), {}
        with contextlib.suppress(OSError, ValueError):
            # If another process 0 of the same job listens there, that one answers.
            return _answered(introduce)
        taken = (
            f"process {mine} cannot listen at {bind}: another program uses the port,"
            " perhaps an earlier job that has not ended; end that program, or choose"
            " another port"
        )
        return Answer([taken]), {}
    with server, Enrolment(server, mine.processes, secret) as enrolment:
        enrolment.wait(until)
        records = [mine, *enrolment.came.values()]
        reasons = faults(records, [*enrolment.left.values()], timeout)
        if len(records) < mine.processes:
            reasons += _loopback(server.getsockname()[0], mine)
        by_rank = sorted(records, key=lambda record: record.rank)
        answer = Answer(reasons, [] if reasons else [each.host for each in by_rank])
        for connection in enrolment.came:
            connection.settimeout(PATIENCE)
            with contextlib.suppress(OSError):  # the process has gone meanwhile
                connection.sendall(answer.to_json())
        return answer, {} if reasons else enrolment.release()


def _report(
    place: Place, mine: Record, until: float, timeout: float, introduce: _Introduce
) -> _Answered:
    """Sends the record to process 0 until it answers, or time is up."""
    errors = dict[str, None]()  # of all attempts, each once: the last may say least
    while True:
        try:
            return _answered(introduce)
        except (OSError, ValueError) as error:
            errors[str(error)] = None
            # What listens there at first may be a process 0 that is about to end.
            if time.monotonic() + _AGAIN < until:
                time.sleep(_AGAIN)
                continue
            untold = (
                f"process {mine} could not reach process 0 at {place.coordinator}"
                f" within {timeout:g} s ({'; '.join(errors)}): process 0 does not run"
                " there, or the job has begun without this process, or another program"
                " uses the port; check the coordinator's address and the output of"
                " process 0"
            )
            host = place.coordinator.rpartition(":")[0].strip("[]")
            return Answer([untold, *_loopback(host, mine)]), {}


def _answered(introduce: _Introduce) -> _Answered:
    line, connection = introduce()
    try:
        return Answer.from_json(line), {0: connection}
    except ValueError:
        connection.close()
        raise


def _bound(address: str, until: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, where = _resolved(host.strip("[]"), int(port), until)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(family, kind, protocol))
        # JAX's service listens at the same port right after the roll call.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(1024)
        stack.pop_all()
    return server


def _resolved(host: str, port: int, until: float) -> Any:
    """Resolves a host name, and retries until time is up."""
    while True:
        try:
            # The name of a Kubernetes pod is known only some time after its start.
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror:
            if time.monotonic() + _AGAIN > until:
                raise
            time.sleep(_AGAIN)


def _unbound(bind: str, mine: Record, error: OSError) -> str:
    return (
        f"process {mine} cannot listen at {bind} ({error}): the coordinator's address"
        " must belong to the host of process 0; if other hosts reach this host under"
        " another address, pass the address to listen at as `bind` or in"
        f" JAX_COORDINATOR_BIND_ADDRESS, such as 0.0.0.0:{bind.rpartition(':')[2]}"
    )


def _loopback(address: str, mine: Record) -> list[str]:
    try:
        found = socket.getaddrinfo(address, None)[0][4][0]
    except OSError:
        return []
    if not ipaddress.ip_address(found).is_loopback:
        return []
    return [
        f"{address} is a loopback address on {mine.host}, which processes on other"
        " hosts cannot reach; if the job has other hosts, give a coordinator address"
        " under which they can reach the host of process 0"
    ]

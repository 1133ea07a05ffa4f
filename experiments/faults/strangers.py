"""Lets strangers connect to process 0 during roll calls, and measures what they cost.

Claim: whatever 1,000 connections of ten kinds send, every job starts, at most one
second later than without them, and process 0 needs at most 64 MB more memory. The limit
is no delay and no memory.

A job has four processes on this machine and a secret, as `pipejax launch` makes one.
The last process comes three seconds after the others. Meanwhile, 100 strangers of one
kind connect, half of them from another loopback address. They stay connected until the
job has begun. The delay is the difference between two medians over rounds: the time
from the call of `pj.launch.initialize` in the last process to its return, with the
strangers and without. The memory is the largest that process 0 had by then.

Command: python -m experiments.faults.strangers
Time: about six minutes on 2 cores.
Result: experiments/results/faults_strangers.json
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import tyro

from experiments import report
from pipejax import launch
from pipejax._internal import proofs

PROCESSES = 4
SLEEP = 3.0  # seconds for which strangers are alone with three of the processes
MB = 1e6
MOST_DELAY, MOST_MEMORY = 1.0, 64.0  # seconds and MB


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the roll calls."""

    strangers: int = 100
    """Number of strangers of each kind."""
    rounds: int = 3
    """Number of jobs with each kind of strangers, and without any."""
    process: int | None = None
    """Be this process of a job. The program calls itself with this flag."""
    out: pathlib.Path = report.RESULTS / "faults_strangers.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> int:
    """Runs all jobs, prints the table, and writes the result file.

    Returns:
      The exit code, which is 1 if a kind of strangers costs more than claimed.
    """
    if config.process is not None:
        return joined(config.process)
    jax.config.update("jax_platforms", "cpu")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("none", *KINDS)}
    for _ in range(config.rounds):
        for name, jobs in found.items():
            jobs.append(job(KINDS.get(name), config.strangers))
    costs = {name: cost(found["none"], jobs) for name, jobs in found.items()}
    bars = {"most_delay": MOST_DELAY, "most_memory": MOST_MEMORY}
    settings = {**report.settings(config), "process": None}
    record = {**settings, **bars, "jobs": found, "costs": costs}
    report.save(config.out, seed=0, **record)
    report.console().print(report.table("strangers", rows(costs)))
    return int(not all(each["met"] for each in costs.values()))


def joined(rank: int) -> int:
    """Joins the job as this process, and prints what that has cost."""
    if rank == PROCESSES - 1:
        time.sleep(SLEEP)
    begin = time.monotonic()
    launch.initialize(timeout=60.0)
    seconds = time.monotonic() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB
    sys.stdout.write(json.dumps({"seconds": seconds, "memory": memory}) + "\n")
    return 0


def job(kind: "Kind | None", strangers: int) -> dict[str, float]:
    """Runs a job among strangers; returns its seconds, and the MB of process 0.

    Raises:
      RuntimeError: If a process of the job fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(PROCESSES),
        proofs.VARIABLE: proofs.drawn(),
    }
    command = [sys.executable, "-m", "experiments.faults.strangers", "--process"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(rank)],
                    env={**environ, "JAX_PROCESS_ID": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            for rank in range(PROCESSES)
        ]
        if kind is not None:
            stack.enter_context(visited(port, kind, strangers))
        said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a job among strangers has failed: {said}")
    each = [json.loads(text) for text in said]
    return {"seconds": each[-1]["seconds"], "memory": each[0]["memory"]}


Kind = Callable[[socket.socket], None]


@contextlib.contextmanager
def visited(port: int, kind: Kind, strangers: int) -> Iterator[None]:
    """Lets strangers connect as soon as process 0 listens, and keeps them connected."""
    connections: list[socket.socket] = []

    def visit() -> None:
        for number in range(strangers):
            source = ("127.0.0.1", "127.0.0.2")[number % 2], 0
            connection = _connected(port, source)
            connections.append(connection)
            with contextlib.suppress(OSError):  # process 0 has refused the stranger
                kind(connection)

    threads = [threading.Thread(target=visit, daemon=True)]
    for thread in threads:
        thread.start()
    yield
    for connection in connections:
        connection.close()


def _connected(port: int, source: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + 30.0
    while True:
        try:
            place = ("127.0.0.1", port)
            connection = socket.create_connection(place, source_address=source)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            connection.settimeout(1.0)
            return connection


RECORD = b'{"rank": 1, "processes": 4, "host": "x", "same": {}, "modules": {}}\n'


def _sends(text: bytes) -> Kind:
    return lambda connection: connection.sendall(text)


def _silent(connection: socket.socket) -> None:
    del connection


def _leaves(connection: socket.socket) -> None:
    connection.close()


def _drips(connection: socket.socket) -> None:
    for _ in range(5):
        connection.sendall(b"x")
        time.sleep(0.001)


def _guesses(connection: socket.socket) -> None:
    """Follows the protocol with another secret, and then sends a record."""
    theirs = connection.recv(1000).decode().split()[1]
    own = proofs.drawn()
    proof = proofs.proof(b"guessed", proofs.REPORTS, own, theirs)
    connection.sendall(f"{own} {proof}\n".encode() + RECORD)


def _echoes(connection: socket.socket) -> None:
    connection.sendall(connection.recv(1000))


KINDS: dict[str, Kind] = {
    "silent": _silent,
    "leaves at once": _leaves,
    "HTTP": _sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a record": _sends(RECORD),
    "an impossible record": _sends(RECORD.replace(b'"rank": 1', b'"rank": 99')),
    "4 MB in one line": _sends(b"x" * 2**22),
    "a thousand lines": _sends(b"x\n" * 1000),
    "a byte at a time": _drips,
    "another secret": _guesses,
    "what it hears": _echoes,
}


def cost(
    without: list[dict[str, float]], among: list[dict[str, float]]
) -> dict[str, Any]:
    """Returns the delay in seconds and the memory in MB that strangers cost."""
    delay, memory = (
        statistics.median(each[key] for each in among)
        - statistics.median(each[key] for each in without)
        for key in ("seconds", "memory")
    )
    met = delay <= MOST_DELAY and memory <= MOST_MEMORY
    return {"delay": delay, "memory": memory, "met": met}


def rows(costs: dict[str, Any]) -> list[list[str]]:
    """Returns the table of delays and memory, with a row for each kind."""
    table = [["strangers", "delay, s", "memory, MB"]]
    for name, each in costs.items():
        if name != "none":
            table.append([name, f"{each['delay']:+.2f}", f"{each['memory']:+.0f}"])
    return table


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))

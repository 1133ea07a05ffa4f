"""What tests of jobs share."""

import concurrent.futures
import dataclasses
import socket

from pipejax import launch
from pipejax.launch import _record, _roll_call


def free_port():
    """One that nobody listens at, on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def record(rank, processes=3, **changes):
    same = {"jax": "0.10.2", "XLA_FLAGS": ""}
    base = _record.Record(rank, processes, f"host{rank}", same, {"train": "abc"})
    return dataclasses.replace(base, **changes)


def outcomes(port, records, timeout=20.0, bind=None):
    """What each process's call comes to: hosts, or its error."""

    def one(mine):
        address = f"127.0.0.1:{port}"
        place = launch.Place("arguments", address, mine.processes, mine.rank)
        try:
            return _roll_call.call(place, mine, bind=bind or address, timeout=timeout)
        except launch.RollCallError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(one, records))

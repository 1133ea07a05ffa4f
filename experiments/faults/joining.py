"""Runs on every host: joins the job, with a fault of one process or of all."""

import dataclasses
import json
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import tyro

from pipejax import launch

WRONG = 1
"""The rank of the process with the fault, in faults of a process other than 0."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the start."""

    fault: str
    """The name of the fault, one of `FAULTS`."""
    timeout: float = 15.0
    """The timeout of the roll call in seconds."""


def main(config: Config) -> None:
    """Prints the error of the roll call, and after how many seconds it was raised."""
    rank = int(os.environ["RANK"])
    FAULTS[config.fault](rank)
    begun = time.monotonic()
    rate = 0.2 if (config.fault, rank) == ("another configuration", WRONG) else 0.1
    try:
        launch.initialize(timeout=config.timeout, config={"learning_rate": rate})
        said = ""
    except launch.RollCallError as error:
        said = str(error)
    seconds = time.monotonic() - begun
    sys.stdout.write(json.dumps({"said": said, "seconds": seconds}) + "\n")
    sys.stdout.flush()
    time.sleep(max(0.0, 1.5 * config.timeout - seconds))  # until all have their errors
    os._exit(1)  # ends the cluster, with all processes that still wait


def _none(rank: int) -> None:
    del rank


def _absent(rank: int) -> None:
    if rank == WRONG:
        time.sleep(600)


def _twice(rank: int) -> None:
    if rank == WRONG:
        os.environ["RANK"] = "2"


def _another_size(rank: int) -> None:
    if rank == WRONG:
        os.environ["WORLD_SIZE"] = "5"


def _another_setting(rank: int) -> None:
    jax.config.update("jax_enable_x64", rank == WRONG)


def _other_flags(rank: int) -> None:
    if rank == WRONG:
        os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=true"


def _other_devices(rank: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2 if rank == WRONG else 1)


def _another_source(rank: int) -> None:
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "layers.py").write_text(f"WIDTH = {128 if rank == WRONG else 256}\n")
    sys.path.insert(0, str(folder))
    __import__("layers")


def _loopback(rank: int) -> None:
    del rank
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def _port_taken(rank: int) -> None:
    if rank == 0:
        # A detached socket stays open as long as the process runs.
        socket.create_server(("", int(os.environ["MASTER_PORT"]))).detach()


def _another_host(rank: int) -> None:
    del rank
    os.environ["MASTER_ADDR"] = os.environ["MASTER_ADDR"].rpartition(".")[0] + ".2"


FAULTS: dict[str, Callable[[int], None]] = {
    "none": _none,
    "a process does not come": _absent,
    "two come as one": _twice,
    "another number of processes": _another_size,
    "another setting of JAX": _another_setting,
    "other flags of XLA": _other_flags,
    "other devices": _other_devices,
    "another source": _another_source,
    "another configuration": _none,
    "the coordinator is loopback": _loopback,
    "the port is taken": _port_taken,
    "the coordinator is another host": _another_host,
}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

"""Helps to test places and jobs."""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import socket
import time

import jax

from pipejax import launch
from pipejax.launch import _introduce, _record, _roll_call


def ended(pid, patience=10.0):
    """Waits for the end of a process, and returns whether it has ended."""
    stat, end = pathlib.Path(f"/proc/{pid}/stat"), time.monotonic() + patience
    while time.monotonic() < end:
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # nobody has asked for its status
            return True
        time.sleep(0.01)
    return False


def free_port():
    """Returns a port on loopback at which no program listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def record(rank, processes=3, **changes):
    same = {"jax": "0.10.2", "XLA_FLAGS": ""}
    base = _record.Record(rank, processes, f"host{rank}", same, {"train": "abc"})
    return dataclasses.replace(base, **changes)


def outcomes(port, records, timeout=20.0, bind=None, secret=b""):
    """Returns the outcome of each process's call: the hosts, or the error.

    `secret` is that of all processes, or a list with one for each.
    """
    secrets = secret if isinstance(secret, list) else [secret] * len(records)

    def one(mine, secret):
        address = f"127.0.0.1:{port}"
        place = launch.Place("arguments", address, mine.processes, mine.rank)
        try:
            given = {"bind": bind or address, "timeout": timeout, "secret": secret}
            meeting = _roll_call.call(place, mine, **given)
            for connection in meeting.connections.values():
                connection.close()
            return meeting.hosts
        except launch.RollCallError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(one, records, secrets))


def connected(port, source="127.0.0.1", secret=None):
    """Returns a connection to process 0, which has proved a secret if that is given."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            address = ("127.0.0.1", port)
            connection = socket.create_connection(address, source_address=(source, 0))
            with contextlib.ExitStack() as stack:
                stack.enter_context(connection)
                if connection.getsockname() == address:
                    continue  # connected to itself, since nothing listens yet
                if secret is not None:
                    _introduce.prove(connection, secret, 5.0)
                stack.pop_all()
            return connection
        time.sleep(0.01)


# The variables that launchers set in the environment of a process.
OWN = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "gpu[07,09-12]",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.1,10.1.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


class Store:
    """A key-value store without a runtime, which can be cut off."""

    def __init__(self):
        self.texts = {}
        self.cut_off = False

    def key_value_set(self, name, text, allow_overwrite):
        assert allow_overwrite
        if self.cut_off:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        self.texts[name] = text

    def key_value_dir_get(self, folder):
        return [item for item in self.texts.items() if item[0].startswith(folder)]

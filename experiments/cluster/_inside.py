"""Makes the network and runs the hosts, as the first process in the namespaces."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from . import _network
from ._environment import environment
from ._network import Network
from ._start import cores

# A host has a network, a host name and a `/dev/shm` of its own, and sees the disks that
# others mount. Its command waits for its cable.
_HOST = (
    *("unshare", "--net", "--uts", "--mount", "--propagation", "unchanged"),
    *("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && echo && read _ && exec "$@"', "sh"),
)


def run(network: Network, command: Sequence[str]) -> int:
    """Runs the command on every host.

    Returns:
      0, or the exit code of the first host that failed.
    """
    _name_hosts(network)
    _share_mounts()
    _network.switch()
    hosts = [_host(network, rank, command) for rank in range(network.size)]
    for host in hosts:
        assert host.stdin
        host.stdin.write("go\n")
        host.stdin.close()
    readers = [
        threading.Thread(target=_stream, args=(rank, host), daemon=True)
        for rank, host in enumerate(hosts)
    ]
    for reader in readers:
        reader.start()
    failed = _first_failure({host.pid: rank for rank, host in enumerate(hosts)})
    for reader in readers if failed is None else [readers[failed[0]]]:
        reader.join(timeout=5)
    if failed is None:
        return 0
    rank, code = failed
    sys.stderr.write(f"{_network.name(rank)} failed with exit code {code}\n")
    return code


def _name_hosts(network: Network) -> None:
    """Replaces `/etc/hosts`, in these namespaces only."""
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
        file.write(network.hosts_file())
        file.flush()
        pathlib.Path(file.name).chmod(0o644)
        # The mount keeps the file when its name is deleted.
        subprocess.run(["mount", "--bind", file.name, "/etc/hosts"], check=True)


def _share_mounts() -> None:
    """Lets hosts see what others mount, but for what is mounted on `/dev/shm`."""
    subprocess.run(["mount", "--make-rshared", "/"], check=True)
    subprocess.run(["mount", "--bind", "/dev/shm", "/dev/shm"], check=True)
    subprocess.run(["mount", "--make-private", "/dev/shm"], check=True)


def _host(
    network: Network, rank: int, command: Sequence[str]
) -> "subprocess.Popen[str]":
    host = subprocess.Popen(
        [*_HOST, *command],
        env={**os.environ, **environment(rank, network.size)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert host.stdout
    host.stdout.readline()  # waits for the shell in the namespace
    _network.connect(rank, host.pid, network.rates[rank])
    os.sched_setaffinity(host.pid, cores(rank, network.size))
    return host


def _stream(rank: int, host: "subprocess.Popen[str]") -> None:
    assert host.stdout
    for line in host.stdout:
        sys.stdout.write(f"{_network.name(rank)} | {line}")
        sys.stdout.flush()


def _first_failure(ranks: dict[int, int]) -> tuple[int, int] | None:
    """Waits until all processes have ended or one has failed.

    Returns:
      The rank and the exit code of the process that failed, or `None`.
    """
    running = dict(ranks)
    while running:
        # The first process of a namespace also inherits the orphans of all others.
        process, status = os.wait()
        rank = running.pop(process, None)
        code = os.waitstatus_to_exitcode(status)
        if rank is not None and code:
            return rank, code if code > 0 else 128 - code
    return None


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    sys.exit(run(Network(tuple(plan["rates"])), plan["command"]))

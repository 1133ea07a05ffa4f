"""Starts a cluster, and leaves nothing of it behind.

The processes of the cluster live in namespaces of their own, for users, processes,
mounts, host names and the network. The first process in these namespaces dies with the
present process, whatever kills it, and all other processes die with the first. The
kernel then removes the switch, the cables and the hosts file, because they have no
process left. There is nothing to clean up, neither here nor at the next start.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import IO

from ._network import Network

_APART = (
    *("setpriv", "--pdeathsig", "KILL", "unshare"),
    *("--user", "--map-root-user", "--net", "--mount", "--pid", "--uts"),
    *("--fork", "--kill-child", "--mount-proc"),
)
_NEEDED = ("setpriv", "unshare", "nsenter", "ip", "tc", "hostname")


def reason_why_not() -> str | None:
    """Returns why no cluster can be made here, in one line, or `None` if one can."""
    if missing := [tool for tool in _NEEDED if shutil.which(tool) is None]:
        return (
            "An emulated cluster needs Linux with iproute2 and util-linux; there is no"
            f" {', '.join(missing)} here."
        )
    # The trial makes the namespaces, a switch, and one link with a limited rate.
    trial = (
        "ip link add name switch type bridge"
        " && ip link add name one type veth peer name other"
        " && tc qdisc add dev one root tbf rate 1mbit burst 64kb latency 50ms"
    )
    done = subprocess.run(
        [*_APART, "sh", "-c", trial], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or "it failed").splitlines()[-1]
        return f"The kernel allows no network namespaces here: {said}"
    return None


def start(network: Network, command: Sequence[str], log: IO[str] | None = None) -> int:
    """Runs a command on every host, and waits for all hosts.

    Args:
      network: The hosts.
      command: The command that each host runs, in this working directory. Its
        environment is that of this process, with the variables of `_environment`.
      log: The file for the output of all hosts; `None` takes that of this process.

    Returns:
      0, or the exit code of the host that failed first. The other hosts are stopped
      when one fails.
    """
    plan = json.dumps({"rates": network.rates, "command": [*command]})
    inside = [sys.executable, "-m", f"{__package__}._inside", plan]
    ends = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, _exit) for number in ends]
    # Ctrl-C reaches this process alone, which then kills all others at once.
    child = subprocess.Popen(
        [*_APART, *inside],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log and subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return child.wait()
    finally:
        child.kill()
        child.wait()
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)


def cores(host: int, hosts: int) -> set[int]:
    """Returns the cores of a host: its share of all, or one that it shares.

    `pipejax launch` shares out cores in the same way. The rule is repeated here so that
    a cluster starts without importing JAX.
    """
    usable = sorted(os.sched_getaffinity(0))
    share = len(usable) // hosts
    if not share:
        return {usable[host % len(usable)]}
    return set(usable[host * share : (host + 1) * share])


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)

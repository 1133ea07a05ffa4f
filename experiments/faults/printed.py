"""Gets the output of the hosts of a cluster."""

import tempfile
from collections.abc import Sequence

from experiments import cluster


def printed(network: cluster.Network, command: Sequence[str]) -> dict[int, str]:
    """Runs a command on every host, and returns their outputs by number of host."""
    with tempfile.TemporaryFile("w+") as log:
        cluster.start(network, command, log)
        log.seek(0)
        lines = log.readlines()
    return {
        host: "".join(
            line.removeprefix(begin)
            for line in lines
            if line.startswith(begin := f"host{host} | ")
        )
        for host in range(network.size)
    }

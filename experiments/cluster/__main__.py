"""Emulates a cluster on one machine: namespaces, a switch, and links of a chosen rate.

A command runs on every host, and each line of its output follows the name of the host.
The exit code is 0, or that of the host that failed first. However the run ends, it
leaves nothing behind.

  python -m experiments.cluster --hosts 4 --rate 500mbit -- python -m my.program
"""

import dataclasses
import sys

import tyro

from . import Network, reason_why_not, start


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the hosts. The command after `--` runs on each of them."""

    hosts: int = 4
    """The number of hosts. Each is pinned to cores of its own if there are enough."""
    rate: tuple[str, ...] = ("500mbit",)
    """The rate of all links in both directions, or of each: 500mbit 100mbit."""


def main(arguments: list[str]) -> int:
    """Returns 0, the exit code of the first failed host, or 2 if no host can start."""
    if "--" not in arguments and not {"-h", "--help"} & {*arguments}:
        return _refuse("What is to run on the hosts? Put it after --: -- python ...")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    config = tyro.cli(
        Config,
        args=arguments[:end],
        prog="python -m experiments.cluster",
        description=__doc__,
    )
    if not (command := arguments[end + 1 :]):
        return _refuse("What is to run on the hosts? There is nothing after --.")
    try:
        network = Network.of(config.hosts, config.rate)
    except ValueError as error:
        return _refuse(str(error))
    if why := reason_why_not():
        return _refuse(why)
    return start(network, command)


def _refuse(why: str) -> int:
    sys.stderr.write(why + "\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

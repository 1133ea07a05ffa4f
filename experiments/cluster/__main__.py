"""A cluster on one machine: network namespaces, a switch, links of a chosen rate.

Runs a command on every host, its output behind the host's name, and ends with 0 or with
the exit code of the host that failed first. Nothing is left behind, whatever ends it.

  python -m experiments.cluster --hosts 4 --rate 500mbit -- python -m my.program
"""

import dataclasses
import sys

import tyro

from . import Network, reason_why_not, start


@dataclasses.dataclass(frozen=True)
class Config:
    """The hosts; what follows `--` runs on each of them."""

    hosts: int = 4
    """How many. They share the cores, each pinned to its own as far as these go."""
    rate: tuple[str, ...] = ("500mbit",)
    """Of every link, in both directions; or one for each host: 500mbit 100mbit."""


def main(arguments: list[str]) -> int:
    """The exit code of the first host that failed, or 0."""
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

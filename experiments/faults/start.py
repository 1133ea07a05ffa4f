"""Shows which processes of a job that cannot start say what is wrong, and how soon.

Claim: whatever is wrong, every process that has come says so within ten seconds after
the chosen timeout, in a line that names the process and its host. A fault that shows
once all processes have come is named at once. A job has four hosts.

Command: python -m experiments.faults.start
Time: five minutes, most of it waiting.
Result: experiments/results/faults_start.json
"""

import dataclasses
import json
import pathlib
import sys
from collections import Counter
from typing import Any

import tyro

from experiments import cluster, report

from .joining import FAULTS
from .printed import printed


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the starts."""

    faults: tuple[str, ...] = tuple(FAULTS)
    """The names of the faults, which are those of `experiments.faults.joining`."""
    hosts: int = 4
    """The number of hosts, each with one process."""
    rate: str = "200mbit"
    """The rate of the links, in the notation of `tc`."""
    timeout: float = 15.0
    """The timeout of `pj.launch.initialize` in seconds."""
    seed: int = 0
    """The seed that the result notes. Nothing in this experiment is random."""
    out: pathlib.Path = report.RESULTS / "faults_start.json"
    """The file that the result is written to."""


def main(config: Config) -> dict[str, Any]:
    """Provokes each fault, saves the result, and prints the table."""
    if why := cluster.reason_why_not():
        sys.exit(why)
    found = {fault: started(fault, config) for fault in config.faults}
    report.save(config.out, **report.settings(config), found=found)
    report.console(width=160).print(report.table("start", rows(found, config.hosts)))
    return found


def started(fault: str, config: Config) -> list[dict[str, Any]]:
    """Returns the host, the error and the seconds of each process that has come."""
    command = [sys.executable, "-m", f"{__package__}.joining", "--fault", fault]
    command += ["--timeout", str(config.timeout)]
    network = cluster.Network.of(config.hosts, (config.rate,))
    return [
        {"host": host} | json.loads(line)
        for host, text in printed(network, command).items()
        for line in text.splitlines()
        if line.startswith('{"said"')
    ]


def rows(found: dict[str, list[dict[str, Any]]], hosts: int) -> list[list[str]]:
    """Returns titles, then a row for each fault.

    The columns say how many processes raised an error, how soon, and its last line.
    """
    table = [["what is wrong", "said by", "after, at most", "what is said"]]
    for fault, each in found.items():
        unable = [told for told in each if told["said"]]
        last = {told["host"]: told["said"].split("\n- ")[-1] for told in unable}
        if len(set(last.values())) > 1:  # each process names itself
            last = {host: of_itself(host, line) for host, line in last.items()}
        latest = max((told["seconds"] for told in unable), default=None)
        lines = Counter(last.values())
        table.append(
            [
                fault,
                f"{' and '.join(map(str, lines.values() or [0]))} of {hosts}",
                "" if latest is None else f"{latest:.0f} s",
                "; and: ".join(lines) or "nothing: the job begins",
            ]
        )
    return table


def of_itself(host: int, line: str) -> str:
    """Returns a message in which a process names itself as "this process"."""
    line = line.replace(f"process {host} on host{host}", "this process")
    return line.replace(f"on host{host}", "on this host")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

"""Jobs on four hosts that cannot start: who says what, and how soon.

Claim: whatever is wrong, every process that came says so, in a line that names who and
where, within ten seconds of the chosen timeout; what shows once all have come, at once.

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
    """The starts."""

    faults: tuple[str, ...] = tuple(FAULTS)
    """Of `experiments.faults.joining`."""
    hosts: int = 4
    """With a process each."""
    rate: str = "200mbit"
    """Of their links."""
    timeout: float = 15.0
    """Seconds, of `pj.launch.initialize`."""
    seed: int = 0
    """Nothing here is left to chance."""
    out: pathlib.Path = report.RESULTS / "faults_start.json"
    """Where the result goes."""


def main(config: Config) -> dict[str, Any]:
    """Provokes each, prints the table, writes the result file."""
    if why := cluster.reason_why_not():
        sys.exit(why)
    found = {fault: started(fault, config) for fault in config.faults}
    report.save(config.out, **report.settings(config), found=found)
    report.console(width=160).print(report.table("start", rows(found, config.hosts)))
    return found


def started(fault: str, config: Config) -> list[dict[str, Any]]:
    """What each that came was told, and after how many seconds; with its host."""
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
    """Titles, then a fault a row: how many say it, how soon, and what, last of all."""
    table = [["what is wrong", "said by", "after, at most", "what is said"]]
    for fault, each in found.items():
        unable = [told for told in each if told["said"]]
        last = {told["host"]: told["said"].split("\n- ")[-1] for told in unable}
        if len(set(last.values())) > 1:  # each of itself
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
    """What a process says, without which it is."""
    line = line.replace(f"process {host} on host{host}", "this process")
    return line.replace(f"on host{host}", "on this host")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

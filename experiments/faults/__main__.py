"""Provokes a random fault in each of fifty jobs: it is named, and nothing is lost.

Claim: whatever happens to any process, its link, its disk or its whole host, at any
step, all other processes or their launchers print what happened. After `pipejax launch`
has started the job again, the job ends with the same parameters, bit for bit, as a job
without a fault.

A job trains an MLP on digits, on four hosts. It has width 2, eight bits with error
feedback, the host executor, a checkpoint every five steps, and a watchdog of ten
seconds. A link that becomes a hundred times slower is no fault: no process may be ended
because of it. A host that is lost returns empty, with another launcher. Jobs with such
a fault have snapshots in memory.

Command: python -m experiments.faults; python -m experiments.faults --kinds "host lost"
Time: about an hour each on 2 cores. The second command adds its jobs to the result.
Result: experiments/results/faults.json
"""

import dataclasses
import functools
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
import tyro

from experiments import cluster, report

from .command import launched, program, returning
from .printed import printed
from .provoke import MEMORY, Fault, Kind, Lost


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the jobs."""

    runs: int = 50
    """The number of jobs with a fault. One job without a fault also runs."""
    kinds: tuple[Kind | Lost, ...] = get_args(Kind)
    """The kinds of faults, which the jobs have in turn."""
    hosts: int = 4
    """The number of hosts, each with one process."""
    rate: str = "200mbit"
    """The rate of the links, in the notation of `tc`."""
    steps: int = 40
    """The number of steps of a job."""
    every: int = 5
    """The number of steps from one checkpoint to the next."""
    limit: float = 10.0
    """The limit of the watchdog in seconds."""
    seed: int = 0
    """The seed that decides which process has its fault at which step."""
    out: pathlib.Path = report.RESULTS / "faults.json"
    """The file that the result is written to."""


def main(config: Config) -> list[dict[str, Any]]:
    """Runs all jobs, saves the result after each job, and prints the table.

    Jobs in the result file with faults of other kinds stay there.
    """
    if why := cluster.reason_why_not():
        sys.exit(why)
    alone = digests(job(config)[0])
    if len(alone) != config.hosts or len(set(alone)) != 1:
        raise RuntimeError(f"a job without a fault did not end alike: {alone}")
    earlier = report.kept(config.out, "outcomes")
    outcomes = [each for each in earlier if each["fault"] not in config.kinds]
    for fault in faults(config):
        outcome = run(config, fault, alone)
        print(outcome, flush=True)
        outcomes.append(outcome)
        report.save(config.out, **report.settings(config), outcomes=outcomes)
    report.console(width=120).print(report.table("faults", rows(outcomes)))
    return outcomes


def faults(config: Config) -> Iterator[Fault]:
    """Yields the faults.

    No fault happens before the first checkpoint has begun.
    """
    rng = np.random.default_rng(config.seed)
    for number in range(config.runs):
        kind = config.kinds[number % len(config.kinds)]
        rank = int(rng.integers(config.hosts))
        step = int(rng.integers(config.every, config.steps))
        yield kind, 0 if kind == "coordinator killed" else rank, step


def run(config: Config, fault: Fault, alone: list[str]) -> dict[str, Any]:
    """Runs a job with a fault, and returns whether it went as it should."""
    kind, rank, step = fault
    said, seconds = job(config, fault)
    verdict = expected(kind, rank)
    hosts = range(config.hosts)
    others = hosts if kind == "disk full" else [each for each in hosts if each != rank]
    found = [re.search(verdict, said[host]) for host in others]
    silent = [float(each[1]) for each in found if each and each.re.groups and each[1]]
    ended = any("this job is ended" in text for text in said.values())
    named = not ended if kind == "slow" else all(found)
    return {
        "fault": kind,
        "rank": rank,
        "step": step,
        "named": named,
        "said_after_s": max(silent, default=None),
        "again_after_s": started_again(said, [host for host in hosts if host != rank]),
        "same_bits": digests(said) == alone,
        "seconds": round(seconds, 1),
        # The last lines of each host, to find out why.
        **({} if named else {"said": {host: said[host][-2000:] for host in hosts}}),
    }


def job(config: Config, *faults: Fault) -> tuple[dict[int, str], float]:
    """Runs a job with these faults.

    Returns:
      The output of every host, by its number, and the time in seconds.
    """
    network = cluster.Network.of(config.hosts, (config.rate,))
    with tempfile.TemporaryDirectory() as folder:
        names = ("steps", "every", "limit", "rate")
        lost = any(kind == "host lost" for kind, _, _ in faults)
        memory = ["--memory", str(MEMORY)] if lost else []
        command = [*program(config, names, folder, faults), *memory]
        command = launched(command, 3, config.limit)
        command = returning(command) if lost else command
        begun = time.monotonic()
        said = printed(network, command)
        return said, time.monotonic() - begun


def expected(kind: Kind | Lost, rank: int) -> str:
    """Returns a regular expression for what all other processes must print.

    If the message says for how long a process was silent, a group has the seconds.
    """
    if kind == "disk full":
        return r"process \d on host\d failed at step \d+: .*(?:No space|EXHAUSTED)"
    if rank:
        return rf"process {rank} on host{rank} has said nothing for ([\d.]+) s"
    gone = r"JAX has aborted it: process 0, at \S+, is gone"
    if kind.endswith("killed") or kind == "host lost":
        return gone
    silent = r"process 0, .* could not be reached from process \d on host\d for (\d+) s"
    # The launcher of a stopped process kills it about when the others miss it.
    return f"{silent}|{gone}" if kind == "stopped" else silent


def started_again(said: dict[int, str], hosts: Sequence[int]) -> float | None:
    """Returns the seconds from the fault until the last of `hosts` had joined again.

    The result is `None` if not all of them have joined again.
    """
    fault = re.search(r"provoked (\S+)", "".join(said.values()))
    joined = [re.findall(r"joined (\S+)", said[host]) for host in hosts]
    if fault is None or any(len(times) < 2 for times in joined):
        return None
    return round(max(float(times[1]) for times in joined) - float(fault[1]), 1)


def digests(said: dict[int, str]) -> list[str]:
    """Returns the digests of the parameters, one for each host that reached the end."""
    found = [re.search(r"digest (\w+)", text) for text in said.values()]
    return [each[1] for each in found if each]


def rows(outcomes: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each kind of fault."""
    table = [
        [
            "fault",
            "jobs",
            "named by all others",
            "silent for, at most",
            "all others joined again after, at most",
            "same bits",
        ]
    ]
    for kind in dict.fromkeys(outcome["fault"] for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome["fault"] == kind]
        count = functools.partial(sum_of, of_kind)
        silent, again = (
            longest(of_kind, name) for name in ("said_after_s", "again_after_s")
        )
        row = [kind, len(of_kind), count("named"), silent, again, count("same_bits")]
        table.append([str(each) for each in row])
    return table


def longest(outcomes: list[dict[str, Any]], name: str) -> str:
    """Returns the longest time in seconds as text; empty if no outcome has one."""
    found = [outcome[name] for outcome in outcomes if outcome[name] is not None]
    return f"{max(found):.0f} s" if found else ""


def sum_of(outcomes: list[dict[str, Any]], name: str) -> int:
    """Returns the number of outcomes in which the entry `name` is true."""
    return sum(bool(outcome[name]) for outcome in outcomes)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

"""Measures goodput: how much of a job's time ends up in its final parameters.

Claim: with a fault in every 200 steps on average, a job of four hosts continues after
each fault by itself, and ends with the same parameters, bit for bit, as a job without
faults. The result says where its time goes.

The job is that of `experiments.faults`, with a random fault after a random number of
steps, on a random host. Each step also waits, in place of the compute of a larger
model. `pipejax.launch._goodput` says what the parts of the time are. Beside these jobs,
those of an earlier version can run, from its checkout, in turn.

Command: git worktree add before c408040
         python -m experiments.faults.goodput --before before
Time: about 45 minutes on 2 cores.
Result: experiments/results/faults_goodput.json, docs/goodput.png
"""

import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import tyro

from experiments import cluster, report
from pipejax._internal import timeline
from pipejax._internal.figures import new_figure
from pipejax.launch._goodput import PARTS, Event, Goodput, events, goodput

from .__main__ import digests
from .command import launched, program, returning
from .printed import printed
from .provoke import CUT_OFF, MEMORY, Fault, Kind, Lost

# A color for each part, of which no two are alike.
COLORS = (
    *("#7fb2e5", "#f4a261", "#f6d186", "#8fc98f", "#e57373", "#c9a0dc"),
    *("#bf9b84", "#f5b6d2", "#b8b8b8", "#d2d97a", "#7fd1d6", "#dddddd"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the jobs."""

    before: str | None = None
    """A checkout of an earlier version, whose jobs run too; `None` for none."""
    steps: int = 800
    """The number of steps of a job."""
    between: float = 200.0
    """The mean number of steps from one fault to the next."""
    every: int = 200
    """The number of steps from one checkpoint to the next."""
    every_before: int = 20
    """The same for the earlier version, which has no snapshots in memory."""
    pace: float = 0.25
    """Seconds that each step waits, in place of the compute of a larger model."""
    hosts: int = 4
    """The number of hosts, each with one process."""
    rate: str = "200mbit"
    """The rate of the links, in the notation of `tc`."""
    limit: float = 10.0
    """The limit of the watchdog in seconds."""
    kinds: tuple[Kind | Lost, ...] = get_args(Kind)
    """The kinds of faults, one of which each fault is."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One job with faults for each seed. One job without faults also runs."""
    out: pathlib.Path = report.RESULTS / "faults_goodput.json"
    """The file that the result is written to."""
    plot: pathlib.Path | None = pathlib.Path("docs/goodput.png")
    """The file that the picture is written to; `None` for no picture."""


def main(config: Config) -> list[dict[str, Any]]:
    """Runs all jobs, saves the result, prints the table, and draws the picture."""
    if why := cluster.reason_why_not():
        sys.exit(why)
    variants: dict[str, str | None] = {"with snapshots": None}
    if config.before is not None:
        variants["before"] = config.before
    cells = {
        name: {"variant": name, **report.origin(), "jobs": []} for name in variants
    }
    alone: dict[str, str] = {}
    for seed in (None, *config.seeds):
        found_faults = () if seed is None else faults(config, seed)
        for name, checkout in variants.items():
            digest, found = run(config, checkout, found_faults)
            sys.stdout.write(f"{name}: {found}\n")
            if seed is None:
                alone[name] = digest
                cells[name]["without_faults"] = found
            else:
                same = digest == alone[name]
                cells[name]["jobs"].append({**found, "seed": seed, "same_bits": same})
        report.save(config.out, **report.settings(config), cells=[*cells.values()])
    result = [*cells.values()]
    report.console(width=120).print(report.table("goodput", rows(result)))
    if config.plot is not None:
        picture(result, config.plot)
    return result


def faults(config: Config, seed: int) -> tuple[Fault, ...]:
    """Draws the faults of a job, the first one after 20 steps."""
    rng = np.random.default_rng(seed)
    found: list[Fault] = []
    step = 20
    while (step := step + int(rng.geometric(1 / config.between))) < config.steps:
        kind = config.kinds[rng.integers(len(config.kinds))]
        rank = int(rng.integers(config.hosts))
        found.append((kind, 0 if kind == "coordinator killed" else rank, step))
    return tuple(found)


def run(
    config: Config, before: str | None, faults: Sequence[Fault]
) -> tuple[str, dict[str, Any]]:
    """Runs a job, and returns the digest of its parameters and where its time went."""
    network = cluster.Network.of(config.hosts, (config.rate,))
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as lines,
        tempfile.TemporaryDirectory() as cache,
    ):
        names = ("steps", "pace", "limit", "rate")
        command = [*program(config, names, folder, faults), "--cache", cache]
        restarts = 2 * len(faults) + 1
        if before is None:
            command += ["--every", str(config.every), "--memory", str(MEMORY)]
            rate = 3600.0 / (config.between * config.pace)
            more = ("--standby", "--faults-per-hour", f"{rate:.1f}")
            command = launched(command, restarts, config.limit, *more)
            keep = 'PIPEJAX_TIMELINE="$0/$RANK" exec "$@"'
            command = ["sh", "-c", keep, lines, *command]
            lost = any(kind == "host lost" for kind, _, _ in faults)
            command = returning(command) if lost else command
        else:
            command += ["--every", str(config.every_before), "--timeline", lines]
            command = launched(command, restarts, config.limit)
            command = [
                "sh",
                "-c",
                'cd "$0" && exec "$@"',
                before,
                *command,
            ]
        begun = timeline.now()
        said = printed(network, command)
        until = timeline.now()
        hosts = [events(pathlib.Path(lines) / str(i)) for i in range(config.hosts)]
    found = digests(said)
    if len(found) != config.hosts or len(set(found)) != 1:
        ends = {host: text[-2000:] for host, text in said.items()}
        raise RuntimeError(f"a job with {faults} did not end alike: {ends}")
    split = of_hosts(
        hosts if before is None else [*map(converted, hosts)], begun, until
    )
    return found[0], {
        "faults": [list(fault) for fault in faults],
        "seconds": round(split.seconds, 1),
        "step_s": round(split.step, 4),
        "goodput": round(split.share, 4),
        "parts_s": {name: round(each, 2) for name, each in split.parts.items()},
    }


def of_hosts(hosts: Sequence[list[Event]], begun: float, until: float) -> Goodput:
    """Splits the time of a job, which knows when a link was cut off."""
    cut = [
        (event["at"], event["at"] + CUT_OFF)
        for events in hosts
        for event in events
        if event.get("kind") == "cut off"
    ]
    found = goodput(hosts, begun, until, cut)
    if found is None:
        raise RuntimeError("a job took fewer than two steps")
    return found


def converted(events: Sequence[Event]) -> list[Event]:
    """Returns the timeline of an earlier version as a job keeps it now.

    There, a program noted the end of each step and of each save itself.
    """
    found: list[Event] = []
    last = 0.0
    for event in events:
        what, at = event["what"], event["at"]
        if what == "stepped":
            begins = found[-1]["what"] in ("begun", "joined", "restored")
            step = event["step"]
            found += [{"at": last, "what": "step", "step": step}] if begins else []
            found.append({"at": at, "what": "step", "step": step + 1})
        elif what in ("saved", "restored"):
            found.append({**event, "seconds": at - last})
        elif what != "built":
            found.append(event)
        last = at
    return found


def sums(cell: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of each part, added up over the jobs with faults."""
    return {name: sum(job["parts_s"][name] for job in cell["jobs"]) for name in PARTS}


def rows(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each part, with seconds for each fault."""
    titles = ["part"]
    columns = []
    for cell in cells:
        titles += [f"{cell['variant']}: share of the time", "seconds for each fault"]
        found, total = sums(cell), sum(sums(cell).values())
        count = sum(len(job["faults"]) for job in cell["jobs"])
        columns.append([f"{100 * x / total:.1f} %" for x in found.values()])
        columns.append(
            [
                "" if name == "useful" else f"{x / count:.1f}"
                for name, x in found.items()
            ]
        )
    parts = sums(cells[0])
    return [titles, *([name, *row] for name, *row in zip(parts, *columns, strict=True))]


def picture(cells: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws a bar for each variant, with the share of the time of each part."""
    figure = new_figure(figsize=(10, 1.4 + 0.8 * len(cells)), layout="constrained")
    axes = figure.subplots()
    names = [
        f"{cell['variant']} ({cell['jobs'][0]['step_s']:.2f} s a step)"
        for cell in cells
    ]
    left = np.zeros(len(cells))
    for name, color in zip(PARTS, COLORS, strict=True):
        share = np.array(
            [100 * sums(cell)[name] / sum(sums(cell).values()) for cell in cells]
        )
        bars = axes.barh(names, share, left=left, label=name, color=color)
        texts = [f"{each:.0f}" if each >= 2 else "" for each in share]
        axes.bar_label(bars, texts, label_type="center")
        left += share
    axes.set(xlabel="share of the time of a job, %", xlim=(0, 100))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

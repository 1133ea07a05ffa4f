"""Measures goodput: how much of a job's time ends up in its final parameters.

Claim: with a fault in every 200 steps on average, a job of four hosts continues after
each fault by itself, and ends with the same parameters, bit for bit, as a job without
faults. The result says where its time goes.

The job is that of `experiments.faults`, with a random fault after a random number of
steps, on a random host. Each step also waits, in place of the compute of a larger
model. Goodput is the number of steps, times the median time of a step, divided by the
time of the whole job. The rest of the time is split into:

- again: steps that are done a second time, because no checkpoint had them,
- slow steps: what steps take above the median, for example over a slow link,
- saves: checkpoints,
- detection: from the last step before a fault until all processes have begun again,
- outage: from then on, as long as a link stays cut off,
- start: imports and the roll call,
- build: the data, the first state, and the programs that make it,
- restore: reading a checkpoint,
- compilation: what the first step takes above the median,
- end: the drain.

Command: python -m experiments.faults.goodput
Time: about 25 minutes on 2 cores.
Result: experiments/results/faults_goodput.json, docs/goodput.png
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import tyro

from experiments import cluster, report
from pipejax._internal.figures import new_figure

from .__main__ import digests
from .command import launched, program
from .printed import printed
from .provoke import CUT_OFF, Fault, Kind, now

Event = dict[str, Any]
PARTS = (
    *("useful", "again", "slow steps", "saves", "detection", "outage"),
    *("start", "build", "restore", "compilation", "end"),
)

# A color for each part, of which no two are alike.
COLORS = (
    *("#7fb2e5", "#f4a261", "#f6d186", "#8fc98f", "#e57373", "#c9a0dc"),
    *("#bf9b84", "#f5b6d2", "#b8b8b8", "#d2d97a", "#7fd1d6"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the jobs."""

    variant: str = "with a compilation cache"
    """A name for these settings. Results of other names are kept."""
    cache: bool = True
    """If true, restarted processes find their compiled programs in a cache on disk. If
    false, they compile them again."""
    steps: int = 800
    """The number of steps of a job."""
    between: float = 200.0
    """The mean number of steps from one fault to the next."""
    every: int = 20
    """The number of steps from one checkpoint to the next."""
    pace: float = 0.25
    """Seconds that each step waits, in place of the compute of a larger model."""
    hosts: int = 4
    """The number of hosts, each with one process."""
    rate: str = "200mbit"
    """The rate of the links, in the notation of `tc`."""
    limit: float = 10.0
    """The limit of the watchdog in seconds."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One job with faults for each seed. One job without faults also runs."""
    out: pathlib.Path = report.RESULTS / "faults_goodput.json"
    """The file that the result is written to."""
    plot: pathlib.Path = pathlib.Path("docs/goodput.png")
    """The file that the picture is written to."""


def main(config: Config) -> list[dict[str, Any]]:
    """Runs all jobs, saves the result, prints the table, and draws the picture."""
    if why := cluster.reason_why_not():
        sys.exit(why)
    kept = [c for c in report.kept(config.out) if c["variant"] != config.variant]
    alone, undisturbed = run(config, ())
    jobs = []
    for seed in config.seeds:
        digest, found = run(config, faults(config, seed))
        jobs.append({**found, "seed": seed, "same_bits": digest == alone})
        sys.stdout.write(f"{jobs[-1]}\n")
    settings = report.settings(config)
    cell = {
        "variant": config.variant,
        **report.origin(),
        "without_faults": undisturbed,
        "jobs": jobs,
    }
    cells = [*kept, cell]
    report.save(config.out, **settings, cells=cells)
    report.console(width=120).print(report.table("goodput", rows(cells)))
    picture(cells, config.plot)
    return cells


def faults(config: Config, seed: int) -> tuple[Fault, ...]:
    """Draws the faults of a job, the first one after the first checkpoint."""
    rng = np.random.default_rng(seed)
    found: list[Fault] = []
    step = config.every
    while (step := step + int(rng.geometric(1 / config.between))) < config.steps:
        kind: Kind = get_args(Kind)[rng.integers(len(get_args(Kind)))]
        rank = int(rng.integers(config.hosts))
        found.append((kind, 0 if kind == "coordinator killed" else rank, step))
    return tuple(found)


def run(config: Config, faults: Sequence[Fault]) -> tuple[str, dict[str, Any]]:
    """Runs a job, and returns the digest of its parameters and where its time went."""
    network = cluster.Network.of(config.hosts, (config.rate,))
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as timeline,
        tempfile.TemporaryDirectory() as cache,
    ):
        names = ("steps", "every", "pace", "limit", "rate")
        command = [*program(config, names, folder, faults), "--timeline", timeline]
        if config.cache:
            command += ["--cache", cache]
        begun = now()
        restarts = 2 * len(faults) + 1
        said = printed(network, launched(command, restarts, config.limit))
        hosts = [events(pathlib.Path(timeline) / str(i)) for i in range(config.hosts)]
    found = digests(said)
    if len(found) != config.hosts or len(set(found)) != 1:
        raise RuntimeError(f"a job with {faults} did not end alike: {said}")
    parts, step = split(hosts, begun)
    total = sum(parts.values())
    return found[0], {
        "faults": [list(fault) for fault in faults],
        "seconds": round(total, 1),
        "step_s": round(step, 4),
        "goodput": round(parts["useful"] / total, 4),
        "parts_s": {name: round(each, 2) for name, each in parts.items()},
    }


def events(path: pathlib.Path) -> list[Event]:
    """Reads the timeline of a process, with all its attempts."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def split(hosts: Sequence[list[Event]], begun: float) -> tuple[dict[str, float], float]:
    """Splits the time of a job into its parts.

    Args:
      hosts: The timeline of every host.
      begun: When the job was started.

    Returns:
      The seconds of each part, which add up to the time of the job, and the median time
      of a step.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    # The hosts take their steps together, so those of host 0 stand for all.
    numbers: list[int] = []
    firsts: list[float] = []  # the seconds of the first step of each attempt
    others: list[float] = []
    last, begins = begun, True
    for event in hosts[0]:
        at = event["at"]
        if event["what"] == "begun":
            begins = True
        elif event["what"] == "saved":
            parts["saves"] += at - last
            last = at
        elif event["what"] == "stepped":
            if begins:
                last = gap(hosts, last, at, parts)
            (firsts if begins else others).append(at - last)
            numbers.append(event["step"])
            last, begins = at, False
    parts["end"] = max(event["at"] for host in hosts for event in host) - last
    usual, different = float(np.median(others)), len(set(numbers))
    parts["useful"] = usual * different
    parts["again"] = usual * (len(numbers) - different)
    parts["compilation"] = sum(firsts) - usual * len(firsts)
    parts["slow steps"] = sum(others) - usual * len(others)
    return parts, usual


def gap(
    hosts: Sequence[list[Event]], last: float, until: float, parts: dict[str, float]
) -> float:
    """Adds the time between two attempts to the parts, and returns its end.

    Args:
      hosts: The timeline of every host.
      last: The end of the last step or save before the gap.
      until: The end of the first step after it.
      parts: The seconds of each part, to which the time of the gap is added.

    Returns:
      When the first step after the gap begins.
    """
    inside = [e for host in hosts for e in host if last < e["at"] <= until]

    def latest(what: str, since: float) -> float:
        return max([e["at"] for e in inside if e["what"] == what], default=since)

    cut = [e["at"] for e in inside if e.get("kind") == "cut off"]
    ends = {"detection": latest("begun", last)}
    joined = latest("joined", ends["detection"])
    back = max([ends["detection"], *(at + CUT_OFF for at in cut)])
    ends["outage"] = min(back, joined)
    ends["start"] = joined
    ends["build"] = latest("built", joined)
    ends["restore"] = latest("restored", ends["build"])
    for name, end in ends.items():
        parts[name] += end - last
        last = end
    return last


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
        columns.append([f"{100 * found[name] / total:.1f} %" for name in PARTS])
        columns.append(
            ["" if name == "useful" else f"{found[name] / count:.1f}" for name in PARTS]
        )
    return [titles, *([name, *row] for name, *row in zip(PARTS, *columns, strict=True))]


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

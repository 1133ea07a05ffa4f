"""Runs ten thousand steps on four hosts: nothing drifts, and little grows.

Claim: after any number of steps, all hosts have the same parameters, bit for bit. The
memory of their processes rises while programs are compiled, and with the first
checkpoints, whose buffers are used again. After that, memory rises by less than 1 MiB
in 1,000 steps. The numbers of threads and arrays do not rise, except while a checkpoint
is being written.

The job is that of `experiments.faults`, without a fault. Memory is the resident memory
of a process. Its slope is that of a line that is fitted to the second half.

Command: python -m experiments.faults.endurance
Time: about ten minutes on 2 cores.
Result: experiments/results/faults_endurance.json, docs/endurance.png
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import tyro

from experiments import cluster, report
from pipejax._internal.figures import new_figure

from .command import program
from .printed import printed

Diary = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the job."""

    steps: int = 10_000
    """The number of steps."""
    every: int = 1000
    """The number of steps from one checkpoint to the next."""
    diary: int = 100
    """The number of steps from one entry of the diary to the next."""
    hosts: int = 4
    """The number of hosts, each with one process."""
    rate: str = "1gbit"
    """The rate of the links, in the notation of `tc`."""
    limit: float = 60.0
    """The limit of the watchdog in seconds."""
    seed: int = 0
    """The seed of parameters and batches."""
    out: pathlib.Path = report.RESULTS / "faults_endurance.json"
    """The file that the result is written to."""
    plot: pathlib.Path = pathlib.Path("docs/endurance.png")
    """The file that the picture is written to."""


def main(config: Config) -> list[Diary]:
    """Runs the job, saves the result, prints the table, and draws the picture."""
    if why := cluster.reason_why_not():
        sys.exit(why)
    diaries = run(config)
    report.save(config.out, **report.settings(config), diaries=diaries)
    report.console(width=120).print(report.table("endurance", rows(diaries)))
    picture(diaries, config.plot)
    return diaries


def run(config: Config) -> list[Diary]:
    """Runs the job, and returns the diary of every host."""
    network = cluster.Network.of(config.hosts, (config.rate,))
    with tempfile.TemporaryDirectory() as folder:
        names = ("steps", "every", "diary", "limit", "rate", "seed")
        said = printed(network, program(config, names, folder))
    diaries = [
        [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
        for text in said.values()
    ]
    ends = [diary[-1]["step"] if diary else 0 for diary in diaries]
    if ends != [config.steps] * config.hosts:
        raise RuntimeError(f"hosts have come to steps {ends}: {said}")
    return diaries


def rows(diaries: list[Diary]) -> list[list[str]]:
    """Returns titles, then a row for each host."""
    table = [
        [
            "host",
            "parameters as on host 0",
            "memory, MiB, after a tenth",
            "half",
            "all",
            "of the second half, in 1,000 steps",
            "threads",
            "arrays",
        ]
    ]
    for host, diary in enumerate(diaries):
        alike = [
            own["digest"] == first["digest"]
            for own, first in zip(diary, diaries[0], strict=True)
        ]
        tenth, half = diary[len(diary) // 10 - 1], diary[len(diary) // 2 - 1]
        settled = diary[len(diary) // 2 :]
        slope, _ = np.polyfit(
            [entry["step"] for entry in settled],
            [entry["memory"] for entry in settled],
            1,
        )
        table.append(
            [
                f"host{host}",
                f"{sum(alike)} of {len(alike)} times",
                *(f"{entry['memory']:.0f}" for entry in (tenth, half, diary[-1])),
                f"{1000 * slope:+.2f}",
                *(spread(settled, name) for name in ("threads", "arrays")),
            ]
        )
    return table


def spread(entries: Diary, name: str) -> str:
    """Returns the smallest and the largest value, or one number if they are equal."""
    found = [entry[name] for entry in entries]
    return "-".join(map(str, sorted({min(found), max(found)})))


def picture(diaries: list[Diary], path: pathlib.Path) -> None:
    """Draws the memory and the threads of every host against steps."""
    figure = new_figure(figsize=(9, 3.2), layout="constrained")
    for axes, name, title in zip(
        figure.subplots(1, 2),
        ("memory", "threads"),
        ("resident memory, MiB", "threads"),
        strict=True,
    ):
        for host, diary in enumerate(diaries):
            steps = [entry["step"] for entry in diary]
            axes.plot(steps, [entry[name] for entry in diary], label=f"host{host}")
        most = max(entry[name] for diary in diaries for entry in diary)
        axes.set(xlabel="step", title=title, ylim=(0, 1.25 * most))
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

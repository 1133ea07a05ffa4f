"""Ten thousand steps on four hosts: no drift, and how little grows.

Claim: after any number of steps all hosts have the same parameters, bit for bit. What
their processes hold rises while programs are compiled and with the first checkpoints,
whose buffers are used again; then memory by less than 1 MiB in 1,000 steps, and threads
and arrays not at all but for those of a checkpoint that is being written.

The job of `experiments.faults`, left alone. Memory is what a process has resident; its
slope is that of a line through the second half.

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
from pipejax.picture import new_figure

from .printed import printed

Diary = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The job."""

    steps: int = 10_000
    """In all."""
    every: int = 1000
    """Steps from a checkpoint to the next."""
    diary: int = 100
    """Steps from an entry to the next."""
    hosts: int = 4
    """With a process each."""
    rate: str = "1gbit"
    """Of their links."""
    limit: float = 60.0
    """Seconds of the watchdog."""
    seed: int = 0
    """Of parameters and batches."""
    out: pathlib.Path = report.RESULTS / "faults_endurance.json"
    """Where the result goes."""
    plot: pathlib.Path = pathlib.Path("docs/endurance.png")
    """Where the picture goes."""


def main(config: Config) -> list[Diary]:
    """Runs it, prints the table, writes the result file and the picture."""
    if why := cluster.reason_why_not():
        sys.exit(why)
    diaries = run(config)
    report.save(config.out, **report.settings(config), diaries=diaries)
    report.console(width=120).print(report.table("endurance", rows(diaries)))
    picture(diaries, config.plot)
    return diaries


def run(config: Config) -> list[Diary]:
    """Every host's diary."""
    network = cluster.Network.of(config.hosts, (config.rate,))
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", f"{__package__}.program", "--folder", folder]
        for name in ("steps", "every", "diary", "limit", "rate", "seed"):
            program += [f"--{name}", str(getattr(config, name))]
        said = printed(network, program)
    diaries = [
        [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
        for text in said.values()
    ]
    ends = [diary[-1]["step"] if diary else 0 for diary in diaries]
    if ends != [config.steps] * config.hosts:
        raise RuntimeError(f"hosts have come to steps {ends}: {said}")
    return diaries


def rows(diaries: list[Diary]) -> list[list[str]]:
    """Titles, then a host a row."""
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
    """The least and the most; one number if they are the same."""
    found = [entry[name] for entry in entries]
    return "-".join(map(str, sorted({min(found), max(found)})))


def picture(diaries: list[Diary], path: pathlib.Path) -> None:
    """Memory and threads of every host against steps."""
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
        axes.set(xlabel="step", title=title, ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

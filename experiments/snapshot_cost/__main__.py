"""Measures what snapshots in host memory cost, and how fast a state comes back.

Bar: snapshots stop the training for at most 1 % of its time. The limit of a stop is the
time of one copy of the bytes in memory. The limit of a restore from a neighbour is the
time of its bytes on the link.

Two emulated hosts train an MLP of twelve square layers under AdamW at width 2, whose
state is five copies of the parameters. Each step also waits, in place of the compute of
a larger model. Then the job is broken off three times, and restores its state from the
memory of each host, from the memory of the other host (one has lost its own), and from
disk.

Command: python -m experiments.snapshot_cost
Time: about 15 minutes on 2 cores, and 19 GB of memory.
Result: experiments/results/snapshot_cost.json
"""

import dataclasses
import pathlib
from typing import Any

import tyro

from experiments import cluster, report

BAR = 0.01


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    widths: tuple[int, ...] = (912, 2500)
    """The widths of the square layers, each of which makes a model."""
    rate: str = "1gbit"
    """The rate of the links, in the notation of `tc`."""
    pace: float = 0.5
    """Seconds that each step waits, in place of the compute of a larger model."""
    steps: int = 240
    """The number of steps with snapshots."""
    out: pathlib.Path = report.RESULTS / "snapshot_cost.json"
    """The file that the result is written to."""


def main(config: Config) -> None:
    """Measures each model, prints the table, and writes the result file."""
    network = cluster.Network.of(2, (config.rate,))
    cells = []
    for width in config.widths:
        flags = ["--width", str(width), "--pace", str(config.pace)]
        flags += ["--steps", str(config.steps)]
        found = cluster.ask(network, "experiments.snapshot_cost._member", flags)
        cells.append({"width": width, **found})
        report.save(config.out, seed=0, **report.settings(config), bar=BAR, cells=cells)
    table = report.table("snapshots", rows(cells, config.rate))
    report.console(width=140).print(table)


def rows(cells: list[dict[str, Any]], rate: str) -> list[list[str]]:
    """Returns titles, then a row for each model; `rate` is that of the links."""
    bits_per_second = cluster.bits_per_second(rate)
    table = [
        [
            *("state of a process, MB", "stop, s", "one copy, s", "beside, s"),
            *("steps between", "share of the time, %", "memory, GB"),
            *(
                "from own memory, s",
                "from the other host, s",
                "its bytes on the link, s",
            ),
            "from disk, s",
        ]
    ]
    for cell in cells:
        on_the_link = 8 * cell["bytes"] / bits_per_second
        table.append(
            [
                f"{cell['bytes'] / 1e6:.0f}",
                *(f"{cell[name]:.3f}" for name in ("stop", "copy")),
                f"{cell['beside']:.1f}",
                f"{cell['steps_between']}",
                f"{100 * cell['share']:.2f}",
                f"{cell['memory'] / 1e9:.2f}",
                *(f"{cell[name]:.1f}" for name in ("own", "other")),
                f"{on_the_link:.1f}",
                f"{cell['disk']:.1f}",
            ]
        )
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

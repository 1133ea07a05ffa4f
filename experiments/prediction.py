"""Compares predicted and measured exchange times: hosts x rates x algorithms x codecs.

Bar: `pj.timing` predicts the time of every algorithm with every codec with a median
error of at most 10 %, and an error of at most 25 % in the worst case. The prediction
uses only what `pipejax calibrate` has measured of the cluster: exchanges without a
codec, of vectors of the sizes of the calibration, and each codec alone.

Hosts are network namespaces on this machine (`experiments.cluster`), and share its
cores.

Command: python -m experiments.prediction
Time: about an hour on 2 cores.
Result: experiments/results/prediction.json, docs/prediction.png
"""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Collection
from typing import Any

import jax
import tyro

import pipejax as pj
from pipejax import codecs, collectives, timing
from pipejax._internal.figures import new_figure

from . import cluster, report
from .cluster import member


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    hosts: tuple[int, ...] = (2, 4, 8)
    """Numbers of hosts to emulate."""
    rates: tuple[str, ...] = ("100mbit", "200mbit", "500mbit")
    """Rates of the link of each host, in each direction."""
    codecs: tuple[str, ...] = ("truncate", "int8", "int4", "sign")
    """Codecs to measure. Exchanges without a codec are always measured."""
    elements: int = 2**22
    """Length of the vector of each device, in elements of float32. Default: 16 MiB."""
    rounds: int = 5
    """Number of measurement rounds. Errors are those of medians over rounds."""
    on_host: bool = False
    """Measure on this host of a cluster: the program calls itself with this flag."""
    out: pathlib.Path = report.RESULTS / "prediction.json"
    """File to write the result to, as JSON."""
    plot: pathlib.Path = pathlib.Path("docs/prediction.png")
    """File to write the picture to, as PNG."""


def main(config: Config) -> None:
    """Measures on one cluster after another, prints tables, and writes both files."""
    if config.on_host:
        measure(config)
        return
    jax.config.update("jax_platforms", "cpu")
    cells = []
    for hosts, rate in itertools.product(config.hosts, config.rates):
        flags = [
            *("--on-host", "--codecs", *config.codecs),
            *("--elements", str(config.elements), "--rounds", str(config.rounds)),
        ]
        network = cluster.Network.of(hosts, (rate,))
        answer = cluster.ask(network, "experiments.prediction", flags)
        cells.append({"hosts": hosts, "rate": rate, **answer})
        title = f"median and worst error, {hosts} hosts, {rate}"
        report.console().print(report.table(title, rows(cells[-1:])))
        summary = dict(zip(("median", "worst"), errors(cells), strict=True))
        report.save(
            config.out,
            seed=0,
            elements=config.elements,
            absolute_error=summary,
            cells=cells,
        )
    report.console().print(report.table("median and worst error", rows(cells)))
    picture(cells, config.plot)


def measure(config: Config) -> None:
    """Calibrates, then times every algorithm and codec; the first host answers."""
    rank = member.join()
    mesh = pj.data_mesh()
    chosen = {name: codecs.named(name) for name in config.codecs}
    fit = timing.calibrate(mesh, chosen, rounds=config.rounds)
    pairs = {
        f"{algorithm}, {name or 'uncompressed'}": (algorithm, name)
        for algorithm in timing.COST_MODELS
        for name in (None, *chosen)
        if timing.compatible(algorithm, chosen.get(name or ""))
    }
    times = timing.exchange_times(
        mesh,
        {
            title: timing.Case(
                getattr(collectives, algorithm)(chosen.get(name or "")),
                config.elements,
            )
            for title, (algorithm, name) in pairs.items()
        },
        config.rounds,
    )
    rows = {}
    for title, (algorithm, name) in pairs.items():
        codec = chosen.get(name or "")
        exchange = timing.flat(fit.cluster, algorithm, config.elements, codec)
        predicted = timing.duration(fit.cluster, exchange, name)
        rows[title] = {
            "measured": times[title],
            "predicted": predicted.total,
            "parts": predicted._asdict(),
        }
    if rank == 0:
        figures = {
            "cluster": timing.as_json(fit.cluster),
            "samples": {sample.name: sample.times for sample in fit.samples},
            "rows": rows,
        }
        member.answer(figures, config.out)


def error(row: dict[str, Any]) -> float:
    """Returns `predicted / measured - 1` for the median of the measured rounds."""
    return row["predicted"] / statistics.median(row["measured"]) - 1


def errors(
    cells: list[dict[str, Any]], titles: Collection[str] | None = None
) -> tuple[float, float]:
    """Returns the median and the largest of the absolute errors.

    Args:
      cells: The cells of the result.
      titles: The titles of the rows to take. `None` takes all rows.
    """
    found = [
        abs(error(row))
        for cell in cells
        for title, row in cell["rows"].items()
        if titles is None or title in titles
    ]
    return statistics.median(found), max(found)


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the table of median and worst errors, with a column per number of hosts.

    The first row has the titles. There is one row for each algorithm and codec, and a
    last row for all of them.
    """
    hosts = list(dict.fromkeys(cell["hosts"] for cell in cells))
    parts = [title.split(", ") for title in cells[0]["rows"]]
    kinds = dict.fromkeys(itertools.chain(*zip(*parts, strict=True)))
    table = [["", *(f"{count} hosts" for count in hosts)]]
    for kind in (*kinds, "all"):
        chosen = [", ".join(x) for x in parts if kind in (*x, "all")]
        found = [errors([c for c in cells if c["hosts"] == n], chosen) for n in hosts]
        table.append([kind, *(f"{m:.0%}, {worst:.0%}" for m, worst in found)])
    return table


def picture(cells: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws predicted against measured times, in a color for each number of hosts."""
    figure = new_figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    for hosts in dict.fromkeys(cell["hosts"] for cell in cells):
        rows = [
            row
            for cell in cells
            if cell["hosts"] == hosts
            for row in cell["rows"].values()
        ]
        axes.scatter(
            [statistics.median(row["measured"]) for row in rows],
            [row["predicted"] for row in rows],
            s=12,
            label=f"{hosts} hosts",
        )
    low, high = axes.dataLim.intervalx
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    axes.fill_between(
        [low, high], [low * 0.75, high * 0.75], [low * 1.25, high * 1.25], alpha=0.15
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured, seconds",
        ylabel="predicted, seconds (band: 25 %)",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

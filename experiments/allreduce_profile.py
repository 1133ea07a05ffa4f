"""Where an all-reduce spends its time, on emulated hosts with real TCP between.

A reviewer of the Pipe-SGD paper asked. Questions, each answered by a figure:

- linear, tree, ring or hierarchical: by seconds of each phase, on 2, 4 and 8 hosts
- compress every hop or only the ends: a ring under int8 beside a two-shot under int8
- what pipelining can hide: all of it but what the cores do themselves, encode, reduce
  and decode, which they do instead of computing where there is no core to spare

Beside each stands the time of its bytes, counted at the hosts' interfaces, at the rate
of the links. Hierarchical is measured on hosts of two devices, beside flat ones.

Command: python -m experiments.allreduce_profile
Time: about 20 minutes on 2 cores.
Result: experiments/results/allreduce_profile.json, docs/allreduce_profile.png
"""

import dataclasses
import os
import pathlib
import statistics
from typing import Any

import jax
import tyro
from rich.table import Table

import pipejax as pj
from pipejax import codecs, collectives, timing
from pipejax.collectives import AllReduce

from . import cluster, report
from .cluster import member


@dataclasses.dataclass(frozen=True)
class Config:
    """What is taken apart."""

    hosts: tuple[int, ...] = (2, 4, 8)
    """Numbers of them, of one device each."""
    rate: str = "500mbit"
    """Of their links."""
    codecs: tuple[str, ...] = ("none", "truncate", "int8")
    """What travels."""
    elements: int = 2**21
    """Of the vectors."""
    rounds: int = 5
    """Of each; medians count."""
    devices: int = 0
    """Measure here, on a host with so many: how this program calls itself."""
    out: pathlib.Path = report.RESULTS / "allreduce_profile.json"
    """Where the result goes."""
    plot: pathlib.Path = pathlib.Path("docs/allreduce_profile.png")
    """Where the picture goes."""


def main(config: Config) -> None:
    """Asks one cluster after another; prints tables, writes result and picture."""
    if config.devices:
        measure(config)
        return
    jax.config.update("jax_platforms", "cpu")
    cells: list[dict[str, Any]] = []
    for hosts, devices in [*((hosts, 1) for hosts in config.hosts), (4, 2)]:
        flags = [
            *("--devices", str(devices), "--codecs", *config.codecs),
            *("--elements", str(config.elements), "--rounds", str(config.rounds)),
        ]
        network = cluster.Network.of(hosts, (config.rate,))
        rows = cluster.ask(network, "experiments.allreduce_profile", flags)
        bandwidth = cluster.bits_per_second(config.rate) / 8
        for row in rows.values():
            row["wire"] = row["wire_bytes"] / bandwidth
        cells.append({"hosts": hosts, "devices": devices, "rows": rows})
        show(cells[-1])
        settings = {"rate": config.rate, "elements": config.elements}
        report.save(config.out, seed=0, **settings, cells=cells)
    picture(cells, config.plot)


def algorithms(devices: int, codec: codecs.Codec | None) -> dict[str, AllReduce]:
    """What there is to compare, on hosts of so many devices."""
    flat: dict[str, AllReduce] = {
        name: getattr(collectives, name)(codec)
        for name in timing.FORMS
        if timing.compatible(name, codec)
    }
    if devices == 1:
        return flat
    # Inside hosts without a codec; between them the ring, which is a ring of rings.
    levels = collectives.hierarchical(collectives.two_shot(), collectives.ring(codec))
    return {"hierarchical": levels, "ring": flat["ring"], "two_shot": flat["two_shot"]}


def measure(config: Config) -> None:
    """Takes all apart on this host and the others; the first answers."""
    # A collective blocks a thread of its device, while others compute.
    os.environ["NPROC"] = str(2 * config.devices)
    jax.config.update("jax_num_cpu_devices", config.devices)
    rank = member.join()
    axes: Any = "data" if config.devices == 1 else ("host", "device")
    mesh = pj.data_mesh(axis_name=axes)
    cases = {
        f"{algorithm}, {name}": timing.Case(all_reduce, config.elements)
        for name in config.codecs
        for algorithm, all_reduce in algorithms(
            config.devices, None if name == "none" else codecs.named(name)
        ).items()
    }
    profiles = timing.profile(mesh, cases, config.rounds)
    rows = {}
    for name, case in cases.items():
        before = member.wire()
        whole = timing.exchange_times(mesh, {name: case}, config.rounds)[name]
        carried = max(member.wire().since(before)) / (config.rounds + 1)
        rows[name] = {
            "phases": profiles[name]._asdict(),
            "as_one_program": statistics.median(whole),
            "wire_bytes": member.largest([carried])[0],
        }
    if rank == 0:
        member.answer(rows, config.out)


def show(cell: dict[str, Any]) -> None:
    """Prints one cluster's table, in milliseconds."""
    phases = timing.Profile._fields
    table = Table(
        *("ms", *phases, "total", "one program", "wire"),
        title=f"{cell['hosts']} hosts of {cell['devices']}",
    )
    for name, row in cell["rows"].items():
        total = sum(row["phases"].values())
        seconds = [*row["phases"].values(), total, row["as_one_program"], row["wire"]]
        table.add_row(name, *(f"{1e3 * x:.1f}" for x in seconds))
    report.console(width=130).print(table)


def picture(cells: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Stacked bars of every number of hosts, side by side."""
    panels = [
        timing.Panel(
            f"{cell['hosts']} hosts",
            {n: timing.Profile(**row["phases"]) for n, row in cell["rows"].items()},
            {n: row["wire"] for n, row in cell["rows"].items()},
        )
        for cell in cells
        if cell["devices"] == 1
    ]
    timing.profile_picture(panels, path)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

"""Measures where an all-reduce spends its time, between emulated hosts with real TCP.

A reviewer of the Pipe-SGD paper asked three questions, which the figures answer:

- Should an all-reduce be linear (a parameter server), a tree, a ring or hierarchical?
  The experiment measures the seconds of each phase on 2, 4 and 8 hosts.
- Should every hop be compressed, or only both ends? The experiment compares a ring with
  int8 and a two-shot all-reduce with int8.
- How much can pipelining hide? It can hide everything except the work that the cores do
  themselves: encoding, adding and decoding. If no core is to spare, this work takes
  time from the compute.

Each row also has the time that its bytes take at the rate of the links. The bytes are
counted at the network interfaces of the hosts. `hierarchical` is measured on four hosts
with two devices each, and compared with flat algorithms on the same hosts.

Command: python -m experiments.allreduce_profile
Time: about 20 minutes on 2 cores.
Result: experiments/results/allreduce_profile.json, docs/allreduce_profile.png
"""

import dataclasses
import itertools
import os
import pathlib
import statistics
from typing import Any

import jax
import tyro

import pipejax as pj
from pipejax import codecs, collectives, timing
from pipejax.collectives import AllReduce

from . import cluster, report
from .cluster import member


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    hosts: tuple[int, ...] = (2, 4, 8)
    """Numbers of hosts to emulate. Each host has one device."""
    rate: str = "500mbit"
    """Rate of the link of each host, in each direction."""
    codecs: tuple[str, ...] = ("none", "truncate", "int8")
    """Codecs to measure. With "none", nothing is encoded."""
    elements: int = 2**21
    """Length of the vector of each device, in elements of float32."""
    rounds: int = 5
    """Number of measurement rounds. The result has medians over rounds."""
    devices: int = 0
    """Measure on this host of a cluster, with this number of devices. The program calls
    itself on each host with this flag. With 0, it starts the clusters."""
    out: pathlib.Path = report.RESULTS / "allreduce_profile.json"
    """File to write the result to, as JSON."""
    plot: pathlib.Path = pathlib.Path("docs/allreduce_profile.png")
    """File to write the picture to, as PNG."""


def main(config: Config) -> None:
    """Measures on one cluster after another, prints tables, and writes both files."""
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
        settings = {"rate": config.rate, "elements": config.elements}
        report.save(config.out, seed=0, **settings, cells=cells)
    for table in (phases(cells), whole(cells)):
        report.console(width=130).print(report.table("milliseconds", table))
    picture(cells, config.plot)


def algorithms(devices: int, codec: codecs.Codec | None) -> dict[str, AllReduce]:
    """Returns the all-reduces to compare on hosts with this number of devices."""
    flat: dict[str, AllReduce] = {
        name: getattr(collectives, name)(codec)
        for name in timing.COST_MODELS
        if timing.compatible(name, codec)
    }
    if devices == 1:
        return flat
    # A two-shot without a codec inside hosts, and a ring with the codec between them.
    levels = collectives.hierarchical(collectives.two_shot(), collectives.ring(codec))
    return {"hierarchical": levels, "ring": flat["ring"], "two_shot": flat["two_shot"]}


def measure(config: Config) -> None:
    """Profiles each all-reduce together with other hosts; the first host answers."""
    # A collective blocks one thread of its device, while other threads compute.
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


_PHASES = ("encode", "wait", "first exchange", "reduction", "second exchange", "decode")


def phases(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the milliseconds of each phase on four hosts.

    Rows of hosts with several devices have a mark.
    """
    table = [["", *_PHASES, "launch", "one program", "wire"]]
    for cell in (cell for cell in cells if cell["hosts"] == 4):
        mark = " *" * (cell["devices"] > 1)
        for name, row in cell["rows"].items():
            seconds = [*row["phases"].values(), row["as_one_program"], row["wire"]]
            table.append([f"{name}{mark}", *(f"{1e3 * x:.0f}" for x in seconds)])
    return table


def whole(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the milliseconds of each program, and their ratios to those of its wire.

    Only hosts with one device are shown.
    """
    cells = [cell for cell in cells if cell["devices"] == 1]
    table = [[""]]
    for cell in cells:
        table[0] += [f"{cell['hosts']} hosts", "times wire"]
    for name in cells[0]["rows"]:
        found = [cell["rows"][name] for cell in cells]
        times = [(row["as_one_program"], row["wire"]) for row in found]
        cells_of_it = ((f"{1e3 * x:.0f}", f"{x / wire:.2f}") for x, wire in times)
        table.append([name, *itertools.chain(*cells_of_it)])
    return table


def picture(cells: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws stacked bars of the phases: a row for each codec, a column for hosts."""
    flat = [cell for cell in cells if cell["devices"] == 1]
    codecs = dict.fromkeys(name.split(", ")[1] for name in flat[0]["rows"])
    panels = [panel(cell, codec) for codec in codecs for cell in flat]
    timing.profile_picture(panels, path, columns=len(flat))


def panel(cell: dict[str, Any], codec: str) -> timing.Panel:
    """Returns the phases of all algorithms with a codec on a number of hosts."""
    split = {(*name.split(", "),): row for name, row in cell["rows"].items()}
    rows = {algorithm: row for (algorithm, of), row in split.items() if of == codec}
    return timing.Panel(
        f"{cell['hosts']} hosts, codec: {codec}",
        {name: timing.Profile(**row["phases"]) for name, row in rows.items()},
        {name: row["wire"] for name, row in rows.items()},
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

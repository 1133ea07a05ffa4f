"""Trains D-Sync and Pipe-SGD side by side, on virtual devices and on emulated hosts.

Claims: width 2 learns as well as width 1, and each step sends the same bytes, in one
collective. On hosts with a network between them, a step of width 2 takes as long as the
longer of compute and exchange, and not as long as their sum.

Command: make demo
Time: about a minute on 2 cores, installation included.
Result: two tables, runs/demo/accuracy.png, and a folder for each run.
"""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from pipejax._internal.figures import new_figure

from . import cluster, logs, report, time_to_accuracy, train

RUNS = {"D-Sync (K=1)": 1, "Pipe-SGD (K=2)": 2}
GOAL = 0.97
RACE = time_to_accuracy.RACES["digits"]

NEXT = """
Where to go next:
  docs/getting_started.md   a train step for your own loss and optimizer
  docs/overlap.md           is the communication of your step hidden?
  docs/convergence.md       does your model still converge?
  docs/many_hosts.md        starting a job on several hosts"""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the runs."""

    steps: int = 600
    """Number of steps of each run on virtual devices."""
    host_steps: int = RACE.steps
    """Number of steps of each run on emulated hosts."""
    hosts: int = 2
    """Number of hosts to emulate on this machine. With 0, this part is left out."""
    devices: int = 4
    """Number of virtual CPU devices."""
    out: pathlib.Path = pathlib.Path("runs/demo")
    """Folder to write to. Each demo replaces the runs of the demo before."""


def main(config: Config) -> None:
    """Trains on devices, then on hosts; prints tables and a conclusion, and draws."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.devices)
    console = report.console(width=100)
    folders = _on_devices(config, console)
    picture = config.out / "accuracy.png"
    why_not = cluster.reason_why_not() if config.hosts else "The flag says --hosts 0."
    if why_not:
        logs.draw_curves(folders, picture)
        console.print(f"Training on emulated hosts is left out. {why_not}")
        console.print(
            "Shown: Pipe-SGD learns as D-Sync does, with the same bytes. Not shown,"
            " without a network: that its steps are shorter."
        )
    else:
        runs = on_hosts(config, console)
        draw(runs, picture, f"{config.hosts} hosts, {RACE.rate}")
        console.print(conclusion(rows(runs), config.hosts))
    console.print(f"Picture: {picture}. Logs and checkpoints: {config.out}/width-*")
    console.print(NEXT, highlight=False)


def _on_devices(config: Config, console: Console) -> dict[str, pathlib.Path]:
    """Trains at both widths in this process, and returns the folders of the runs."""
    console.print(
        "1. Handwritten digits, an MLP with AdamW, global batch 64, on"
        f" {config.devices} virtual devices of this machine's CPU."
    )
    folders = {label: config.out / f"width-{width}" for label, width in RUNS.items()}
    results = {}
    for label, width in RUNS.items():
        shutil.rmtree(folders[label], ignore_errors=True)
        run = train.Config(width=width, steps=config.steps, out=folders[label])
        results[label] = train.run(run, console)
    console.print(_device_table(results, config.steps))
    console.print(
        "Both widths learn the same and send the same bytes. Pipe-SGD is not faster"
        " here: the devices share one processor, so there is no exchange to hide, and"
        " predicting the weights costs time.\n"
    )
    return folders


def _device_table(results: dict[str, Any], steps: int) -> Table:
    table = Table(title=f"{steps:,} steps, then a drain; per step and device")
    for column in ("", "test accuracy", "steps/s", "all-reduces", "bytes sent"):
        table.add_column(column)
    for label, row in results.items():
        table.add_row(
            label,
            f"{100 * row['test_accuracy']:.1f} %",
            f"{row['steps_per_second']:.0f}",
            str(len(row["collectives"])),
            f"{row['bytes_sent']:,.0f}",
        )
    return table


def on_hosts(config: Config, console: Console) -> dict[str, Any]:
    """Trains with every method of the race on one cluster, and returns the figures."""
    config.out.mkdir(parents=True, exist_ok=True)
    log = config.out / "hosts.log"
    console.print(
        f"2. Digits again, a model with {4e-6 * RACE.problem.elements:.0f} MB of"
        f" gradients, on {config.hosts} emulated hosts with real TCP links of"
        f" {RACE.rate}; what the hosts print goes to {log}."
    )
    race = time_to_accuracy.Config(
        race="digits", steps=config.host_steps, hosts=config.hosts, tests=13
    )
    with log.open("w") as file:
        runs: dict[str, Any] = time_to_accuracy.on_hosts(race, 0, file)
    found = rows(runs)
    console.print(_host_table(found, config.host_steps))
    ours, coded, both = (found[n] for n in ("Pipe-SGD", "Pipe-SGD, int8", "D-Sync"))
    console.print(
        f"A step of D-Sync takes {1e3 * both['step']:.0f} ms: it computes, then"
        f" exchanges. Pipe-SGD does both at once and takes {1e3 * ours['step']:.0f} ms,"
        f" {ours['step'] / ours['limit']:.2f} times its limit. 8-bit gradients send"
        f" {coded['wire_bytes'] / ours['wire_bytes']:.2f} of the bytes"
        f" ({1e3 * coded['step']:.0f} ms).\n"
    )
    return runs


def rows(runs: dict[str, Any]) -> dict[str, Any]:
    """Returns the accuracy of each method, and its figures in seconds and bytes.

    The limit of a step is the longer of two times: its compute, and its bytes at the
    rate of the link. `faster` is the step time of D-Sync divided by that of the method.
    The clock starts after the first step, which compiles.
    """
    bandwidth = cluster.bits_per_second(RACE.rate) / 8
    steps = {
        name: row["seconds"][-1] / (row["steps"][-1] - 1) for name, row in runs.items()
    }
    return {
        name: {
            "accuracy": row["accuracy"][-1],
            "seconds": row["seconds"][-1],
            "goal": time_to_accuracy.first(row, GOAL),
            "step": steps[name],
            "wire_bytes": row["wire_bytes"],
            "limit": max(steps["compute"], row["wire_bytes"] / bandwidth),
            "faster": steps["D-Sync"] / steps[name],
        }
        for name, row in runs.items()
    }


def _host_table(found: dict[str, Any], steps: int) -> Table:
    table = Table(title=f"{steps} steps of every method, on the same batches")
    columns = ("", "accuracy", f"s to {GOAL:.0%}", "s in all", "ms a step")
    for column in (*columns, "MB sent", "limit, ms", "times D-Sync"):
        table.add_column(column, no_wrap=True)
    for name, row in found.items():
        alone = name == "compute"  # without an exchange, accuracy means nothing
        table.add_row(
            name,
            "" if alone else f"{row['accuracy']:.1%}",
            "" if alone or row["goal"] is None else f"{row['goal']:.1f}",
            f"{row['seconds']:.1f}",
            f"{1e3 * row['step']:.0f}",
            f"{1e-6 * row['wire_bytes']:.1f}",
            f"{1e3 * row['limit']:.0f}",
            f"{row['faster']:.2f}",
        )
    return table


def conclusion(found: dict[str, Any], hosts: int) -> str:
    """Returns what the hosts show, whether Pipe-SGD is better or worse than D-Sync."""
    both, ours, coded = (found[n] for n in ("D-Sync", "Pipe-SGD", "Pipe-SGD, int8"))
    points = 100 * (ours["accuracy"] - both["accuracy"])
    return (
        f"Shown: on {hosts} hosts Pipe-SGD took"
        f" {both['faster'] / ours['faster']:.2f} of D-Sync's time for the same steps,"
        f" with 8-bit gradients {both['faster'] / coded['faster']:.2f}, and ended"
        f" {abs(points):.1f} points {'above' if points >= 0 else 'below'} it in test"
        " accuracy (one seed; 360 test images, so a point is 4 of them)."
    )


def draw(runs: dict[str, Any], path: pathlib.Path, network: str) -> None:
    """Draws test accuracy over steps, where methods agree, and over seconds."""
    figure = new_figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, row in runs.items():
        if name != "compute":
            left.plot(row["steps"], row["accuracy"], label=name)
            right.plot(row["seconds"], row["accuracy"], label=name)
    left.set(xlabel="steps", ylabel="test accuracy", title="The same learning ...")
    right.set(xlabel="seconds", title=f"... sooner ({network})")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

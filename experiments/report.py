"""Result files: a figure, and all that is needed to have it again."""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"


def save(path: pathlib.Path, *, seed: int, **figures: Any) -> None:
    """Writes `figures` as JSON, with command, versions, commit, device and seed."""
    record = {
        "command": "python -m " + shlex.join(_module_and_arguments()),
        **origin(),
        "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in (
                *("jax", "jaxlib", "flax", "optax", "equinox", "numpy", "torch"),
            )
            if importlib.util.find_spec(name)
        },
        "seed": seed,
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def origin() -> dict[str, Any]:
    """When, from which commit and on which processor figures are measured."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": commit(), "date": today, "cpu": cpu()}


def cpu() -> dict[str, Any]:
    """The processor: its model, cores, and the widest vector extension it has."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = [[part.strip() for part in x.split(":", 1)] for x in lines if ":" in x]
    found = dict(pairs)
    flags = found.get("flags", "").split()
    widest = [name for name in ("avx512f", "avx2", "avx", "sse4_2") if name in flags]
    return {
        "model": found.get("model name", platform.processor() or "unknown"),
        "cores": os.cpu_count(),
        "vectors": widest[0] if widest else "unknown",
    }


def console(**options: Any) -> Console:
    """A console that prints text as it is, `pipejax[peers]` with its brackets."""
    return Console(markup=False, emoji=False, **options)


def table(title: str, rows: list[list[str]]) -> Table:
    """To be printed; the first row is of the columns' titles."""
    titles, *found = rows
    printed = Table(*titles, title=title)
    for row in found:
        printed.add_row(*row)
    return printed


def settings(config: Any) -> dict[str, Any]:
    """What an experiment was run with, where on this machine aside; and its seed."""
    found = dataclasses.asdict(config)
    for place in {"out", "plot", "stability_plot", "data_dir", "child"} & found.keys():
        del found[place]
    return {"seed": found["seeds"][0], **found} if "seeds" in found else found


def commit() -> str:
    """The commit this runs from, marked if code differs from it, or text.

    Results and pictures are what runs write: they do not count.
    """
    name = _git("rev-parse", "--short=12", "HEAD")
    written = (":!experiments/results", ":!docs/*.png")
    changed = _git("status", "--porcelain", "--untracked-files=no", ":/", *written)
    if not name:
        return "unknown (not a git checkout)"
    return f"{name}-dirty" if changed else name


def _git(*arguments: str) -> str:
    """What git prints; nothing where it fails."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _module_and_arguments() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return [name, *sys.argv[1:]]

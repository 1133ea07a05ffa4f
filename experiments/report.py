"""Result files: the figures of an experiment, and all that is needed to repeat it."""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"


def save(path: pathlib.Path, *, seed: int, **figures: Any) -> None:
    """Writes `figures` as JSON, with all that is needed to repeat the measurement.

    The file has the command, commit, date, processor, devices, versions and seed.
    """
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


def result(name: str) -> dict[str, Any]:
    """Returns the figures of a committed result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def kept(path: pathlib.Path, key: str = "cells") -> list[dict[str, Any]]:
    """Returns the cells of an existing result, each with its commit, date and CPU.

    A run replaces some of them. A cell without an origin has that of its file. `key` is
    the name that the cells have in the file.
    """
    record = json.loads(path.read_text()) if path.exists() else {}
    of_file = {name: record[name] for name in origin() if name in record}
    return [{**of_file, **cell} for cell in record.get(key, [])]


def origin() -> dict[str, Any]:
    """Returns the commit, the date and the processor of a measurement."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": commit(), "date": today, "cpu": cpu()}


def cpu() -> dict[str, Any]:
    """Returns the model of the processor, its cores and its widest vector extension."""
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
    """Makes a console that prints text unchanged, such as `pipejax[peers]`."""
    return Console(markup=False, emoji=False, **options)


def table(title: str, rows: list[list[str]]) -> Table:
    """Makes a table to print. The first row has the titles of the columns."""
    titles, *found = rows
    printed = Table(*titles, title=title)
    for row in found:
        printed.add_row(*row)
    return printed


def quartiles(values: Sequence[float]) -> list[float]:
    """Returns the quartiles of values, also of two; none lies outside of them."""
    return statistics.quantiles(values, n=4, method="inclusive")


def spread(quartiles: Iterable[float]) -> str:
    """Returns the median and, in brackets, the quartiles."""
    low, middle, high = quartiles
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def settings(config: Any) -> dict[str, Any]:
    """Returns the settings of an experiment and its seed, without its paths.

    If there are several seeds, `"seed"` is the first of them.
    """
    found = dataclasses.asdict(config)
    for place in {"out", "plot", "stability_plot", "data_dir", "child"} & found.keys():
        del found[place]
    return {"seed": found["seeds"][0], **found} if "seeds" in found else found


def commit() -> str:
    """Returns the commit of this checkout, marked `-dirty` if tracked files differ.

    Result files and pictures do not count, because experiments write them.
    """
    name = _git("rev-parse", "--short=12", "HEAD")
    written = (":!experiments/results", ":!docs/*.png")
    changed = _git("status", "--porcelain", "--untracked-files=no", ":/", *written)
    if not name:
        return "unknown (not a git checkout)"
    return f"{name}-dirty" if changed else name


def provenance() -> dict[str, str]:
    """Returns what runs of one result may differ in: the commit and the XLA flags."""
    return {"commit": commit(), "xla_flags": os.environ.get("XLA_FLAGS", "")}


def _git(*arguments: str) -> str:
    """Returns what git prints, or nothing if it fails."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _module_and_arguments() -> list[str]:
    """Returns the command without the folders of this machine."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    given = (pathlib.Path(x).name if os.path.isabs(x) else x for x in sys.argv[1:])
    return [name, *given]

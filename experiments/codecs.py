"""What each codec does to training, beside what it sends: MNIST, an MLP, K = 1 and 2.

Claim: codecs that round to the nearest of many levels (bf16, int8, fp8) and the paper's
two train as well as 32 bits do. Codecs that drop most of what they are given lose 2 to
3 points. Error feedback gives PowerSGD all of it back, top k most, sign some; random k
it makes worse.

Two-shot all-reduce over four devices; what is linear (PowerSGD, random k) or
uncompressed by psum. AdamW 1e-3, as of the uncompressed run: nothing is tuned for a
codec, and the delay is plain, without weight prediction. Bytes are what a device sends
in a step.

Command: python -m experiments.codecs --data-dir ~/tensorflow_datasets
Time: about an hour on 2 cores.
Result: experiments/results/codecs.json
"""

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
import warnings
from typing import Any, NamedTuple, get_args

import jax
import tyro
from rich.console import Console
from rich.table import Table

from . import exchange, report, train


class Row(NamedTuple):
    """One way to exchange gradients."""

    codec: exchange.Codec
    feedback: bool = False

    def __str__(self) -> str:
        return f"{self.codec}, fed back" if self.feedback else self.codec


FED_BACK: tuple[exchange.Codec, ...] = (
    "truncate",
    "int4",
    "sign",
    "top_k",
    "random_k",
    "power_sgd",
)
ROWS = [Row(codec) for codec in get_args(exchange.Codec)]
ROWS += [Row(codec, feedback=True) for codec in FED_BACK]


@dataclasses.dataclass(frozen=True)
class Config:
    """The grid; every run is one of `experiments.train`."""

    data: str = "mnist"
    """Data set."""
    data_dir: pathlib.Path | None = None
    """Where it lies."""
    rows: tuple[str, ...] = tuple(map(str, ROWS))
    """Which codecs."""
    widths: tuple[int, ...] = (1, 2)
    """Pipeline widths."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and order."""
    steps: int = 1000
    """A run."""
    batch_size: int = 256
    """Global."""
    cpu_devices: int = 4
    """Virtual."""
    out: pathlib.Path = report.RESULTS / "codecs.json"
    """Where the result goes."""


def main(config: Config) -> dict[str, Any]:
    """Runs the grid, prints the table, writes the result file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    warnings.simplefilter("ignore", UserWarning)  # that a codec is biased, as meant
    console = report.console()
    found = {}
    for row in (row for row in ROWS if str(row) in config.rows):
        runs = {
            f"width {width}": [run(config, row, width, seed) for seed in config.seeds]
            for width in config.widths
        }
        (size,) = {result["bytes_sent"] for result in itertools.chain(*runs.values())}
        found[str(row)] = {
            "bytes_sent": size,
            **{k: [r["test_accuracy"] for r in v] for k, v in runs.items()},
            "skipped": sum(r["skipped"] for r in itertools.chain(*runs.values())),
        }
        console.print(str(row), found[str(row)])
    report.save(
        config.out,
        **report.settings(config),
        optimizer="adamw, 1e-3",
        codecs=found,
    )
    show(console, config, found)
    return found


def run(config: Config, row: Row, width: int, seed: int) -> dict[str, Any]:
    """One training run's result, after its drain."""
    linear = row.codec in ("none", "random_k", "power_sgd")
    with tempfile.TemporaryDirectory() as folder:
        return train.run(
            train.Config(
                data=config.data,
                data_dir=config.data_dir,
                weight_decay=0.0,
                width=width,
                weight_prediction=False,
                all_reduce="psum" if linear else "two_shot",
                codec=row.codec,
                feedback=row.feedback,
                seed=seed,
                steps=config.steps,
                batch_size=config.batch_size,
                test_every=config.steps,
                checkpoint_every=0,
                out=pathlib.Path(folder) / "run",
            ),
            report.console(quiet=True),
        )


def show(console: Console, config: Config, found: dict[str, Any]) -> None:
    """Prints the table."""
    widths = [f"width {width}" for width in config.widths]
    table = Table("codec", "bytes sent", "of 32 bits", *widths)
    most = max(row["bytes_sent"] for row in found.values())
    for name, row in found.items():
        size = row["bytes_sent"]
        cells = [spread(row[width]) for width in widths]
        table.add_row(name, f"{size:,.0f}", f"{size / most:.3f}", *cells)
    table.caption = "test accuracy, mean (least - greatest) of all seeds"
    console.print(table)


def spread(values: list[float]) -> str:
    """Mean, least and greatest, in percent."""
    numbers = (100 * statistics.mean(values), 100 * min(values), 100 * max(values))
    return "{:.1f} ({:.1f} - {:.1f})".format(*numbers)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

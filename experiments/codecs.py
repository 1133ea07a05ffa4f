"""Compares what codecs do to training with what they send, for an MLP on MNIST.

Claim: codecs that round to the nearest of many levels (bf16, int8, fp8) and the two
codecs of the paper (truncate, quantize) train as well as 32 bits do, at widths 1 and 2.
Codecs that drop most of their input lose 1 to 3 points of test accuracy. Error feedback
recovers most of this loss for PowerSGD and top k. For sign, error feedback recovers
some of the loss at width 1, and none at width 2. For random k, error feedback makes the
accuracy worse.

The exchange is a two-shot all-reduce over four devices, or `psum` for linear codecs
(PowerSGD, random k) and without a codec. All runs use AdamW with the learning rate of
the uncompressed run, 1e-3. Nothing is tuned for a codec, and the delay is plain,
without weight prediction. The bytes are those that each device sends in a step.

Command: python -m experiments.codecs --data-dir ~/tensorflow_datasets
Time: about an hour on 2 cores.
Result: experiments/results/codecs.json, docs/codecs.png
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

from pipejax._internal.figures import new_figure

from . import exchange, report, train


class Row(NamedTuple):
    """A codec, with or without error feedback."""

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
# The codecs that the picture names; others with as many bytes lie on these.
LABELLED = ("none", "bf16", "int8", *(f"{name}, fed back" for name in FED_BACK[1:]))
ROWS = [Row(codec) for codec in get_args(exchange.Codec)]
ROWS += [Row(codec, feedback=True) for codec in FED_BACK]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the grid. Each run is a run of `experiments.train`."""

    data: str = "mnist"
    """Name of the data set: digits, or a TFDS name."""
    data_dir: pathlib.Path | None = None
    """Folder of TFDS data sets. By default $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    rows: tuple[str, ...] = tuple(map(str, ROWS))
    """Codecs to compare. The suffix ", fed back" adds error feedback."""
    widths: tuple[int, ...] = (1, 2)
    """Pipeline widths K to train at."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and of the order of the data."""
    steps: int = 1000
    """Number of steps of each run."""
    batch_size: int = 256
    """Examples in a batch, over all devices."""
    cpu_devices: int = 4
    """Number of virtual CPU devices."""
    out: pathlib.Path = report.RESULTS / "codecs.json"
    """File to write the result to, as JSON."""
    plot: pathlib.Path = pathlib.Path("docs/codecs.png")
    """File to write the picture to."""


def main(config: Config) -> dict[str, Any]:
    """Trains the whole grid, prints the table, and writes the result file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    warnings.simplefilter("ignore", UserWarning)  # biased codecs are intended
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
    console.print(report.table("codecs", table(found)))
    picture(found, config.plot)
    return found


def run(config: Config, row: Row, width: int, seed: int) -> dict[str, Any]:
    """Trains once, and returns the result after the drain."""
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


def table(found: dict[str, Any]) -> list[list[str]]:
    """Returns the table of bytes, and of the mean, least and greatest accuracies."""
    titles = ["codec", "bytes sent in a step", "relative to 32 bits"]
    rows = [[*titles, "width 1, test accuracy in %", "width 2"]]
    most = max(row["bytes_sent"] for row in found.values())
    for name, row in found.items():
        size = row["bytes_sent"]
        accuracies = [spread(x) for key, x in row.items() if key.startswith("width")]
        rows.append([name, f"{size:,.0f}", f"{size / most:.3f}", *accuracies])
    return rows


def spread(values: list[float]) -> str:
    """Formats the mean, the least and the greatest value, in percent."""
    numbers = (100 * statistics.mean(values), 100 * min(values), 100 * max(values))
    return "{:.1f} ({:.1f} - {:.1f})".format(*numbers)


def picture(found: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the mean accuracy at each width over the bytes of a step.

    A line leads from a codec without error feedback to the same codec with it.
    """
    figure = new_figure(figsize=(10, 4), layout="constrained")
    widths = [key for key in next(iter(found.values())) if key.startswith("width")]
    panels = figure.subplots(1, len(widths), squeeze=False, sharey=True)[0]
    most = max(row["bytes_sent"] for row in found.values())
    for axes, width in zip(panels, widths, strict=True):
        for name, row in found.items():
            size, height = row["bytes_sent"] / most, 100 * statistics.mean(row[width])
            codec, _, feedback = name.partition(", ")
            axes.plot(size, height, "o", color="C0", mfc="C0" if feedback else "white")
            if feedback and codec in found:
                before = 100 * statistics.mean(found[codec][width])
                axes.plot([size, size], [before, height], color="C0", zorder=0)
            if name in LABELLED:
                axes.annotate(
                    codec, (size, height), (5, -11), textcoords="offset points"
                )
        title = width if width == "width 1" else f"{width}, plain delay"
        axes.set(xscale="log", xlim=(0.007, 2), title=title)
        axes.set_xticks([0.01, 0.1, 1], ["1 %", "10 %", "100 %"])
        axes.set_xlabel("bytes, as a share of 32 bits")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %; filled: with error feedback")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

"""The tables of the results."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments import report
from experiments.convergence import found, spread

from ._methods import CODECS, DELAYS, is_same_for_all
from ._runs import Result, key, tuned

SHOWN = ("K=2", "K=2, rank 16 at once")  # in documents


def delay_rows(result: Result) -> list[list[str]]:
    """Returns a row for each optimizer and number of replicas.

    A cell is how much higher the test loss is than that of synchronous training: the
    mean over the seeds that have been run, and its standard error.
    """
    delayed = [run for run in result["runs"] if run["method"] in DELAYS]
    counts = sorted({run["replicas"] for run in delayed})
    table = [["optimizer", "replicas", *DELAYS]]
    for optimizer, count in itertools.product(_optimizers(delayed), counts):
        cells = (above(optimizer, method, count, result) for method in DELAYS)
        table.append([optimizer, str(count), *cells])
    return table


def codec_rows(result: Result) -> list[list[str]]:
    """Returns a row for each codec, with its bytes an element.

    A cell is as in `delay_rows`, for each optimizer and width, with four replicas.
    """
    coded = [run for run in result["runs"] if "bytes" in run]
    sizes = {run["method"].partition(", ")[2]: run["bytes"] for run in coded}
    cases = [*itertools.product(_optimizers(coded), (1, 2))]
    titles = [f"{optimizer}, K={width}" for optimizer, width in cases]
    table = [["codec", "bytes an element", *titles]]
    for codec in ("none", *(name for name in CODECS if name in sizes)):
        cells = [
            above(name, f"K={width}" + f", {codec}" * (codec != "none"), 4, result)
            for name, width in cases
        ]
        table.append([codec, f"{sizes.get(codec, 4):.3g}", *cells])
    return table


def above(optimizer: str, method: str, replicas: int, result: Result) -> str:
    """Returns how much higher the runs of a method end than synchronous ones."""
    return _above(paired(optimizer, method, replicas, result))


def paired(
    optimizer: str, method: str, replicas: int, result: Result
) -> list[list[dict[str, Any]]]:
    """Returns the synchronous run and that of a method, for each seed that has both."""
    rate = tuned(optimizer, result)

    def end(name: str, seed: int) -> Any:
        wanted = key(result["task"], optimizer, rate, name, replicas, seed)
        if is_same_for_all(name):
            del wanted["replicas"]
        return found(result["runs"], wanted)

    pairs = [[end(name, seed) for name in ("K=1", method)] for seed in result["seeds"]]
    return [pair for pair in pairs if all(pair)]


def _above(pairs: Sequence[Sequence[Any]]) -> str:
    ends = [[run["test_loss"] for run in pair] for pair in pairs]
    if any(None in pair for pair in ends):
        return "diverged"
    if not ends:
        return ""
    return spread([later - first for first, later in ends], 4)


def _optimizers(runs: Sequence[dict[str, Any]]) -> list[str]:
    return [*dict.fromkeys(run["optimizer"] for run in runs)]


def committed() -> list[Result]:
    """Returns the committed results, a task each."""
    names = [f"replicas_{task}" for task in ("mnist", "cifar10", "shakespeare")]
    there = {path.stem for path in report.RESULTS.glob("replicas_*.json")}
    return [report.result(name) for name in names if name in there]


def shown(
    result: Result,
) -> Iterator[tuple[str, int, list[list[list[dict[str, Any]]]]]]:
    """Yields an optimizer, a number of replicas, and the pairs of runs of `SHOWN`.

    Those that have less than three seeds are left out.
    """
    runs = [run for run in result["runs"] if run["method"] == SHOWN[0]]
    counts = sorted({run["replicas"] for run in runs})
    for optimizer, count in itertools.product(_optimizers(runs), counts):
        pairs = [paired(optimizer, name, count, result) for name in SHOWN]
        if all(len(each) >= 3 for each in pairs):
            yield optimizer, count, pairs


def shown_rows(results: Sequence[Result]) -> list[list[str]]:
    """Returns the rows of `SHOWN` that have three seeds, of several tasks.

    A method whose result does not depend on the number of replicas has one value for
    all of them.
    """
    table = [["task", "optimizer", "replicas", "test loss of K=1", *SHOWN]]
    for result in results:
        for optimizer, count, ends in shown(result):
            first = np.mean([pair[0]["test_loss"] for pair in ends[0]])
            cells = (_above(pairs) for pairs in ends)
            title = result["task"], optimizer, str(count), f"{first:.4f}"
            table.append([*title, *cells])
    return table

"""Logs of a run: JSON lines, TensorBoard scalars, and a picture of the curves."""

import json
import math
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import matplotlib.pyplot as plt
from tensorboardX import SummaryWriter


class Log:
    """Writes the scalars of a step to `metrics.jsonl` and to TensorBoard.

    A run that resumes from step n continues its files. The rows after step n are
    dropped first, because the run will log these steps again.
    """

    def __init__(self, folder: pathlib.Path, resume_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [row for row in read(path) if row["step"] <= resume_step]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")
        self._board = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one line to disk at once.

        A value that is not finite is null in `metrics.jsonl`, and is left out of
        TensorBoard.
        """
        finite = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for name, value in finite.items():
            if value is not None:
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._board.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of a log, without a last line that a kill has cut off."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def draw_curves(runs: Mapping[str, pathlib.Path], out: pathlib.Path) -> None:
    """Draws training loss and test accuracy over steps, with one line for each run.

    Args:
      runs: The folder of each run, by its label.
      out: The PNG file to write.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for label, folder in runs.items():
        rows = read(folder / "metrics.jsonl")
        for axes, name in ((left, "loss"), (right, "test_accuracy")):
            points = [(row["step"], row[name]) for row in rows if row.get(name)]
            axes.plot([x for x, _ in points], [y for _, y in points], label=label)
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="step", ylabel="test accuracy")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=150)
    plt.close(figure)

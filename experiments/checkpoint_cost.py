"""Measures what the checksums of a checkpoint cost, beside the save and the restore.

Bar: the checksums take at most 5 % of a save, from its call to the last byte on the
disk, and at most 5 % of a restore. The limit is 0 %.

The state is that of an MLP of twelve square layers under AdamW at width 2, which is
four copies of the parameters. In each round, the state is saved and restored, and the
checksums of its arrays are computed once more by themselves. The ratio is taken in each
round. The table also has the speed of the checksums beside that of a copy, which reads
and writes each byte once.

Command: python -m experiments.checkpoint_cost
Time: about two minutes on 2 cores.
Result: experiments/results/checkpoint_cost.json
"""

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import pipejax as pj
from pipejax import checkpoint
from pipejax._internal.checksums import checksums
from pipejax.checkpoint._leaves import named

from . import report

LAYERS = 12
BAR = 0.05


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    widths: tuple[int, ...] = (256, 1024)
    """Widths of the square layers. Each makes a model."""
    rounds: int = 7
    """Number of rounds. The result has medians and quartiles over rounds."""
    out: pathlib.Path = report.RESULTS / "checkpoint_cost.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> None:
    """Measures each model, prints the table, and writes the result file."""
    jax.config.update("jax_platforms", "cpu")
    cells = [measured(width, config.rounds) for width in config.widths]
    report.save(config.out, seed=0, bar=BAR, limit=0, cells=cells)
    table = report.table("checksums of a checkpoint", rows(cells))
    report.console(width=120).print(table)


def measured(width: int, rounds: int) -> dict[str, Any]:
    """Returns the seconds of each part, and the ratios, for one model."""
    train = pj.make_train_step(_loss, optax.adamw(1e-3), mesh=pj.data_mesh(1))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    state = train.init([jax.random.normal(key, (width, width)) for key in keys])
    state, _ = train.step(state, jnp.ones((8, width)))
    arrays = {
        name: leaf
        for name, leaf in named(state._replace(calls=None)).items()
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) and leaf.size
    }
    like = jax.eval_shape(lambda: state)
    parts: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            times = _round(folder, train, state, like, arrays)
        if number:  # the first round compiles
            for name, seconds in times.items():
                parts.setdefault(name, []).append(seconds)
    size = sum(array.nbytes for array in arrays.values())
    return {
        "width": width,
        "bytes": size,
        "seconds": parts,
        "of_save": _ratio(parts["checksums"], parts["save"]),
        "of_restore": _ratio(parts["checksums"], parts["restore"]),
    }


def _round(
    folder: str, train: pj.TrainStep, state: Any, like: Any, arrays: dict[str, Any]
) -> dict[str, float]:
    with checkpoint.manager(folder) as manager:

        def save() -> None:
            checkpoint.save(manager, state)
            manager.wait_until_finished()

        return {
            "save": _seconds(save),
            "restore": _seconds(lambda: checkpoint.restore(manager, train, like)),
            "checksums": _seconds(lambda: checksums(arrays)),
            "copy": _seconds(lambda: jax.tree.map(jnp.copy, arrays)),
        }


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def _ratio(part: list[float], whole: list[float]) -> list[float]:
    """Returns the quartiles over rounds of `part / whole`."""
    each = [a / b for a, b in zip(part, whole, strict=True)]
    return report.quartiles(each)


def _loss(params: Any, batch: jax.Array) -> jax.Array:
    for layer in params:
        batch = jnp.tanh(batch @ layer)
    return jnp.mean(batch**2)


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the table: sizes, speeds, and the share of the checksums."""
    table = [["state, MB", "save, s", "restore, s", "checksums, s", "copy, s"]]
    table[0] += ["of the save, %", "of the restore, %"]
    for cell in cells:
        medians = [statistics.median(times) for times in cell["seconds"].values()]
        shares = [
            "{1:.1f} ({0:.1f}-{2:.1f})".format(*(100 * x for x in cell[name]))
            for name in ("of_save", "of_restore")
        ]
        seconds = [f"{x:.3f}" for x in medians]
        table.append([f"{cell['bytes'] / 1e6:.0f}", *seconds, *shares])
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

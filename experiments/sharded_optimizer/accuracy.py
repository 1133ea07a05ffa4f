"""Measures how training ends with a sharded optimizer, beside an unsharded one.

Claim: at width 2, SGD with momentum and AdamW end within 0.01 nats or 0.2 points of
synchronous training on three tasks, wherever the unsharded default does.

The tasks, the tuned learning rates, and the runs of synchronous training and of the
unsharded pipeline are those of `experiments.convergence`. The same train step runs here
with `shard_optimizer=True`, from the same seeds, on four virtual devices, with and
without a codec of 4 bits for the all-gather.

Command: python -m experiments.sharded_optimizer.accuracy --text tinyshakespeare.txt
         If it is interrupted, start it again: it keeps the runs that have ended.
Time: about 80 minutes on 2 cores.
Result: experiments/results/sharded_optimizer_accuracy.json
"""

import dataclasses
import itertools
import json
import pathlib
import statistics
from typing import Any

import jax
import tyro

from pipejax import codecs

from .. import report
from ..convergence._change import change
from ..convergence._contenders import OPTIMIZERS, Method
from ..convergence._runs import found, key, of_seeds, tuned_rate
from ..convergence._tasks import TASKS, make_task
from ..convergence._train import train

SHARDED = "K=2, sharded"
SHARDED_METHOD = Method(2, weight_prediction="linearized", shard_optimizer=True)
METHODS = {
    SHARDED: SHARDED_METHOD,
    "K=2, sharded, int4": dataclasses.replace(
        SHARDED_METHOD, gather_codec=codecs.int4()
    ),
}
BESIDE = ("K=2, plain", "K=2, predicted")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the runs."""

    tasks: tuple[str, ...] = TASKS
    """The names of the tasks."""
    optimizers: tuple[str, ...] = ("momentum", "adamw")
    """The names of the optimizers."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of parameters and batches."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text file that the transformer learns from."""
    cpu_devices: int = 4
    """The number of virtual devices."""
    out: pathlib.Path = report.RESULTS / "sharded_optimizer_accuracy.json"
    """The file of the result. Runs that it already holds are not repeated."""


def main(config: Config) -> None:
    """Runs what the result does not hold yet, and prints the table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    others, runs = unsharded(), begun(config.out)
    for name in config.tasks:
        task = make_task(name, text=config.text, data_dir=config.data_dir, steps=None)
        for optimizer in config.optimizers:
            rate = tuned_rate(name, optimizer, others["seeds"][0], others["runs"])
            for seed, method in itertools.product(config.seeds, METHODS):
                run = key(name, optimizer, rate, method, seed)
                if found(runs, run) is not None:
                    continue
                ended = train(
                    task,
                    METHODS[method],
                    OPTIMIZERS[optimizer],
                    rate=rate,
                    seed=seed,
                    devices=config.cpu_devices,
                )
                print(run, ended["test_loss"], ended["test_accuracy"], flush=True)
                runs.append(run | ended | {"commit": report.commit()})
                report.save(
                    config.out,
                    seed=config.seeds[0],
                    seeds=config.seeds,
                    cpu_devices=config.cpu_devices,
                    runs=runs,
                )
    report.console(width=140).print(
        report.table("changes from K=1", rows(others, runs))
    )


def unsharded() -> dict[str, Any]:
    """Returns the result of `experiments.convergence`."""
    return json.loads((report.RESULTS / "convergence.json").read_text())


def begun(out: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the runs that a result already holds."""
    return json.loads(out.read_text())["runs"] if out.exists() else []


def rows(others: dict[str, Any], runs: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each task and optimizer that has all seeds.

    A cell has the change from synchronous training: that of test loss in nats, then
    that of test accuracy in percentage points, as means over seeds.
    """
    together = others | {"runs": [*others["runs"], *runs]}
    names = (*BESIDE, *dict.fromkeys(run["method"] for run in runs))
    table = [["task", "optimizer", "test loss of K=1", *names]]
    for task, optimizer, rate in dict.fromkeys(
        (run["task"], run["optimizer"], run["rate"]) for run in runs
    ):
        setting = task, optimizer, rate
        if len(of_seeds(together, *setting, SHARDED)) < len(others["seeds"]):
            continue
        ends = [x["test_loss"] for x in of_seeds(together, *setting, "K=1")]
        changes = (change(together, setting, name) for name in names)
        cells = ["" if each is None else str(each) for each in changes]
        table.append([task, optimizer, f"{statistics.mean(ends):.4f}", *cells])
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

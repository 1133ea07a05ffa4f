"""Measures how a delay changes learning, by the number of replicas that share a batch.

Question: how much does each way to train with a delay lose, the more replicas share a
batch of a given size? The more they are, the noisier is a device's own gradient, by
which it predicts. What is exchanged at once does not depend on their number.

The global batch is the same for any number of replicas. A step runs for all replicas on
one device (`_simulated`), with the program of the real step. The tasks are those of
`experiments.learning`, the text with 64 sequences a batch. A run is short, which is hard
for a delay: most of its harm comes early, where the loss falls fast. A search in
factors of 2 tunes the learning rate for synchronous training, and every method then
runs at this rate. Methods that exchange a part at once have the same result for any
number of replicas, and run for the least.

Command: python -m experiments.replicas --task mnist
         and with --task cifar10, and with --task shakespeare --text tinyshakespeare.txt
         If it is interrupted, start it again: it keeps the runs that have ended.
Result: experiments/results/replicas_TASK.json, once all runs have ended
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import tyro

import pipejax as pj
from experiments import learning, report
from experiments.convergence import (
    OPTIMIZERS,
    Run,
    finite,
    found,
    make_task,
)

from ._simulated import Simulated

# The arguments of `pj.make_train_step` by the name of a method.
METHODS: dict[str, dict[str, Any]] = {
    "K=1": {"width": 1},
    "K=2": {},
    "K=2, own": {"weight_prediction": "own"},
    "K=2, plain": {"weight_prediction": False},
    "K=2, rank 4 at once": {"at_once": 4},
    "K=2, rank 8 at once": {"at_once": 8},
    "K=2, rank 16 at once": {"at_once": 16},
}
# The examples of a batch, which the replicas share.
BATCH = {"mnist": 256, "cifar10": 64, "shakespeare": 64}
# The rates that the search tries first.
FIRST = {
    "mnist": {"momentum": 0.1, "adamw": 0.004, "muon": 0.001},
    "cifar10": {"momentum": 0.025, "adamw": 0.002, "muon": 0.002},
    "shakespeare": {"momentum": 0.4, "adamw": 0.008, "muon": 0.008},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison."""

    task: str
    """The name of the task, one of `experiments.learning`."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """The names of the optimizers, whose rate is tuned for every task."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The names of the methods to compare with synchronous training."""
    replicas: tuple[int, ...] = (4, 16, 64, 256)
    """The numbers of replicas, of which a task takes those that divide its batch."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds of parameters and batches."""
    steps: int = 500
    """The number of steps of every run."""
    data_dir: pathlib.Path | None = None
    """The folder of the TFDS data sets; by default TFDS's own folder."""
    text: pathlib.Path = pathlib.Path("tinyshakespeare.txt")
    """The text file that the transformer learns from."""
    out: pathlib.Path | None = None
    """The file of the result, by default `replicas_TASK.json` beside the others. Runs
    that it already holds are not repeated."""

    @property
    def path(self) -> pathlib.Path:
        """The file of the result."""
        return self.out or report.RESULTS / f"replicas_{self.task}.json"


def main(config: Config) -> dict[str, Any]:
    """Runs what the result does not hold yet, and prints the table."""
    jax.config.update("jax_platforms", "cpu")
    result, task = begun(config), task_of(config)
    for optimizer in config.optimizers:
        for run in itertools.chain(
            search(config.task, optimizer, result), grid(optimizer, config, result)
        ):
            if found(result["runs"], run) is None:
                ended = train(task, run)
                print(run, ended["test_loss"], ended["test_accuracy"], flush=True)
                result["runs"].append(run | ended | report.provenance())
                report.save(config.path, seed=config.seeds[0], **result)
    report.console(width=120).print(report.table("loss above K=1", rows(result)))
    return result


def begun(config: Config) -> dict[str, Any]:
    """Returns the result so far, with the runs that the file already holds."""
    runs: list[Run] = []
    if config.path.exists():
        before = json.loads(config.path.read_text())
        if before["steps"] != config.steps:
            raise ValueError(
                f"{config.path} has runs of {before['steps']} steps, not of"
                f" {config.steps}: give another --out, or remove it"
            )
        runs = before["runs"]
    return {
        "task": config.task,
        "steps": config.steps,
        "seeds": list(config.seeds),
        "runs": runs,
    }


def task_of(config: Config) -> learning.Task:
    """Returns the task, the text with longer batches than for a few devices."""
    if config.task == "shakespeare":
        return learning.characters(
            config.text, batch_size=BATCH[config.task], steps=config.steps
        )
    return make_task(
        config.task, text=config.text, data_dir=config.data_dir, steps=config.steps
    )


def key(
    task: str, optimizer: str, rate: float, method: str, replicas: int, seed: int
) -> Run:
    """Returns the values that identify a run."""
    return {
        "task": task,
        "optimizer": optimizer,
        "rate": rate,
        "method": method,
        "replicas": replicas,
        "seed": seed,
    }


def search(task: str, optimizer: str, result: dict[str, Any]) -> Iterator[Run]:
    """Yields the runs that tune the learning rate, in factors of 2.

    It goes to lower, then to higher rates, until the loss does not fall any more.
    """

    def run(rate: float) -> Run:
        return key(task, optimizer, rate, "K=1", 1, result["seeds"][0])

    def loss(rate: float) -> float:
        ended = found(result["runs"], run(rate))
        return math.inf if ended is None else ended["test_loss"] or math.inf

    rate = FIRST[task][optimizer]
    yield run(rate)
    for factor in (0.5, 2.0):
        yield run(factor * rate)
        while loss(factor * rate) < loss(rate):
            rate *= factor
            yield run(factor * rate)


def tuned(optimizer: str, result: dict[str, Any]) -> float:
    """Returns the rate at which synchronous training has the lowest test loss."""
    swept = [
        run
        for run in result["runs"]
        if (run["optimizer"], run["method"]) == (optimizer, "K=1")
        and run["seed"] == result["seeds"][0]
    ]
    return min(swept, key=lambda run: run["test_loss"] or math.inf)["rate"]


def grid(optimizer: str, config: Config, result: dict[str, Any]) -> Iterator[Run]:
    """Yields the runs that are compared. The runs of the search must have ended."""
    rate = tuned(optimizer, result)
    methods = ("K=1", *(name for name in config.methods if name != "K=1"))
    for seed, method in itertools.product(config.seeds, methods):
        for replicas in counts_of(method, replicas_of(config)):
            yield key(config.task, optimizer, rate, method, replicas, seed)


def counts_of(method: str, counts: list[int]) -> list[int]:
    """Returns the numbers of replicas that a method runs with."""
    if METHODS[method].get("width") == 1:
        return [1]
    return counts[:1] if is_same_for_all(method) else counts


def is_same_for_all(method: str) -> bool:
    """Returns whether results do not depend on the number of replicas."""
    return METHODS[method].get("width") == 1 or "at_once" in METHODS[method]


def replicas_of(config: Config) -> list[int]:
    """Returns the numbers of replicas among which a batch of the task divides."""
    size = BATCH.get(config.task, BATCH["mnist"])
    return [count for count in config.replicas if size % count == 0]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Returns a row for each case: the test loss above that of synchronous training.

    A cell is the mean over the seeds that have been run, and its standard error.
    """
    methods, counts = [name for name in METHODS if name != "K=1"], dict[int, None]()
    for run in result["runs"]:
        counts |= {run["replicas"]: None} if run["method"] != "K=1" else {}
    table = [["optimizer", "replicas", *methods]]
    optimizers = dict.fromkeys(run["optimizer"] for run in result["runs"])
    for optimizer, count in itertools.product(optimizers, sorted(counts)):
        cells = (above(optimizer, method, count, result) for method in methods)
        table.append([optimizer, str(count), *cells])
    return table


def above(optimizer: str, method: str, replicas: int, result: dict[str, Any]) -> str:
    """Returns how much higher the runs of a method end than synchronous ones."""
    rate, task = tuned(optimizer, result), result["task"]

    def end(name: str, seed: int) -> Run | None:
        wanted = key(task, optimizer, rate, name, replicas, seed)
        if is_same_for_all(name):
            del wanted["replicas"]
        return found(result["runs"], wanted)

    pairs = [[end(name, seed) for name in ("K=1", method)] for seed in result["seeds"]]
    return _above([pair for pair in pairs if all(pair)])


def _above(pairs: list[list[Any]]) -> str:
    """Returns how much higher the second runs end than the first, over the seeds."""
    ends = [[run["test_loss"] for run in pair] for pair in pairs]
    if any(None in pair for pair in ends):
        return "diverged"
    if not ends:
        return ""
    above = np.array([later - first for first, later in ends])
    error = above.std(ddof=1) / len(above) ** 0.5 if len(above) > 1 else np.nan
    return f"{above.mean():+.4f} ± {error:.4f}"


def train(task: learning.Task, run: Run) -> dict[str, Any]:
    """Returns the test results after a run."""
    optimizer = OPTIMIZERS[run["optimizer"]]
    tx = optax.chain(task.clip, optimizer.make(task.schedule(run["rate"])))
    settings = dict(METHODS[run["method"]])
    if rank := settings.pop("at_once", None):
        key = jax.random.key(run["seed"])
        settings["at_once"] = pj.codecs.power_sgd(rank, key)
    step = pj.make_train_step(
        task.loss, tx, mesh=pj.data_mesh(1), executor="fused", **settings
    )
    simulated = Simulated(step, run["replicas"])
    state = simulated.init(task.init(run["seed"]))
    state, losses = simulated.run(state, task.batches(run["seed"]), task.steps)
    end = task.test(jax.device_get(simulated.drained(state)))
    reported = losses[step.width - 1 :]  # no earlier loss has arrived
    parts = np.array_split(reported, min(25, len(reported)))
    means = [float(np.mean(part)) for part in parts]
    return {
        **{name: finite(value) for name, value in end.items()},
        "losses": [finite(loss) for loss in means],
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

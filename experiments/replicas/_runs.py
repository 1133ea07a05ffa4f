"""Which runs there are, and how each is made."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

import pipejax as pj
from experiments import learning
from experiments.convergence import OPTIMIZERS, Run, finite, found

from ._methods import is_same_for_all, settings
from ._simulated import Simulated

Result = dict[str, Any]
# The rates that the search tries first.
FIRST = {
    "mnist": {"momentum": 0.1, "adamw": 0.004, "muon": 0.001},
    "cifar10": {"momentum": 0.025, "adamw": 0.002, "muon": 0.002},
    "shakespeare": {"momentum": 0.4, "adamw": 0.008, "muon": 0.008},
}

# The tasks that run on virtual devices: `jax.vmap` makes convolutions slow on CPUs.
ON_DEVICES = ("cifar10",)


def key(
    task: str, optimizer: str, rate: float, method: str, replicas: int, seed: int
) -> Run:
    """Returns the values that identify a run."""
    return {
        "task": task,
        "optimizer": optimizer,
        "rate": rate,
        "method": method,
        "replicas": 1 if method == "K=1" else replicas,
        "seed": seed,
    }


def search(optimizer: str, result: Result) -> Iterator[Run]:
    """Yields the runs that tune the learning rate, in factors of 2.

    It goes to lower, then to higher rates, until the loss does not fall any more.
    """
    task, seed = result["task"], result["seeds"][0]

    def run(rate: float) -> Run:
        return key(task, optimizer, rate, "K=1", 1, seed)

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


def tuned(optimizer: str, result: Result) -> float:
    """Returns the rate at which synchronous training has the lowest test loss."""
    wanted = {"optimizer": optimizer, "method": "K=1", "seed": result["seeds"][0]}
    swept = [run for run in result["runs"] if wanted.items() <= run.items()]
    return min(swept, key=lambda run: run["test_loss"] or math.inf)["rate"]


def grid(
    optimizer: str,
    methods: Sequence[str],
    counts: Sequence[int],
    seeds: Sequence[int],
    result: Result,
) -> Iterator[Run]:
    """Yields the runs that are compared. The runs of the search must have ended."""
    rate = tuned(optimizer, result)
    methods = ("K=1", *(name for name in methods if name != "K=1"))
    for seed, method in itertools.product(seeds, methods):
        for count in counts[:1] if is_same_for_all(method) else counts:
            yield key(result["task"], optimizer, rate, method, count, seed)


def train(task: learning.Task, run: Run) -> dict[str, Any]:
    """Returns the test results after a run."""
    name, optimizer = run["task"], OPTIMIZERS[run["optimizer"]]
    made = functools.partial(
        pj.make_train_step,
        task.loss,
        optax.chain(task.clip, optimizer.make(task.schedule(run["rate"]))),
        executor="fused",
    )
    wanted = settings(run["method"], run["seed"], task.steps)
    if wanted.get("delayed") == "least":
        wanted["delayed"] = least_delay(made, task)
    made = functools.partial(made, **wanted)
    trained = on_devices if name in ON_DEVICES else simulated
    params, losses = trained(made, task, run["replicas"], run["seed"])
    parts = np.array_split(losses, min(25, len(losses)))
    means = [float(np.mean(part)) for part in parts]
    return {
        **{name: finite(value) for name, value in task.test(params).items()},
        "losses": [finite(loss) for loss in means],
    }


def least_delay(made: Callable[..., pj.TrainStep], task: learning.Task) -> Any:
    """Returns what to delay if the exchange takes as long as the compute."""
    train = made(mesh=pj.data_mesh(1))
    state = train.abstract_state(task.init(0))
    batch = next(task.batches(0))
    return pj.overlap.least_delay(train, state, batch, compute=1.0, exchange=1.0)


def simulated(
    made: Callable[..., pj.TrainStep], task: learning.Task, replicas: int, seed: int
) -> tuple[Any, list[float]]:
    """Returns the parameters and the losses of a run of simulated replicas."""
    train = made(mesh=pj.data_mesh(1))
    step = Simulated(train, replicas)
    state = step.init(task.init(seed))
    state, losses = step.run(state, task.batches(seed), task.steps)
    params = jax.device_get(step.drained(state))
    return params, losses[train.width - 1 :].tolist()  # no earlier loss has arrived


def on_devices(
    made: Callable[..., pj.TrainStep], task: learning.Task, replicas: int, seed: int
) -> tuple[Any, list[float]]:
    """Returns the parameters and the losses of a run on virtual devices."""
    train = made(mesh=pj.data_mesh(replicas))
    state, infos = train.init(task.init(seed)), []
    for batch in itertools.islice(task.batches(seed), task.steps):
        state, info = train.step(state, batch)
        infos.append(info)
    state, _ = train.drain(state)
    losses = [float(info.loss) for info in infos[train.width - 1 :]]
    return jax.device_get(state.params), losses

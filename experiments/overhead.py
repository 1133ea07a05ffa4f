"""Measures what `train.step` costs relative to a hand-written step, on one device.

Bars: each step of pipejax is compared with a step by hand that does the same, including
a check that gradients are finite. At width 1, and at width 2 without prediction, the
step of pipejax takes at most 1.03 times as long. With prediction, the step takes at
most 1.03 times as long as a step by hand that updates twice. If a step takes less than
10 ms, its compiled program is compared instead, without the Python code around it.

The time that this Python code adds to a call is measured on a model of six arrays of
one element, whose program takes next to no time. It is the difference between a call of
`train.step` and a call of its compiled program.

The limit is 1.00, because both steps do the same work, and one device has nothing to
send. The result also has the step that most people write, which has no check, and a
step with the check of Optax, `optax.apply_if_finite`.

Command: python -m experiments.overhead
Time: about 8 minutes on 2 cores.
Result: experiments/results/overhead.json
"""

import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.step import Inputs, InputSpecs, common_of
from pipejax.train_step._feed import laid_out

from . import by_hand, models, report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    models: tuple[str, ...] = ("mlp", "cnn")
    """Models to train: mlp on images of MNIST's shape, cnn on images of CIFAR-10's."""
    batch_sizes: tuple[int, ...] = (64, 256, 1024, 4096)
    """Numbers of examples per step. The CNN leaves out those above 64."""
    rounds: int = 15
    """Number of rounds. Each round runs every variant in turn, in random order."""
    seconds: float = 0.5
    """Seconds that the step by hand runs in a round, roughly. All variants run the same
    number of steps."""
    calls: int = 1000
    """Number of calls in a round that measures the time of the Python code."""
    seed: int = 0
    """Seed of the data and of the order in each round."""
    out: pathlib.Path = report.RESULTS / "overhead.json"
    """File to write the result to, as JSON."""


Run = Callable[[int], None]
SHAPES = {"mlp": (28, 28, 1), "cnn": (32, 32, 3)}
LARGEST = {"mlp": 4096, "cnn": 64}
BAR = 1.03


def main(config: Config) -> dict[str, Any]:
    """Measures every model, prints a table, and writes the result file."""
    rng = np.random.default_rng(config.seed)
    rows = {}
    for name, size in itertools.product(config.models, config.batch_sizes):
        if size > LARGEST[name]:
            continue
        batch = {
            "image": rng.normal(size=(size, *SHAPES[name])).astype(np.float32),
            "label": rng.integers(10, size=size).astype(np.int32),
        }
        problem = classifier(name, batch)
        runs = variants(*problem, pj.data_mesh(1))
        rows[f"{name}, batch {size}"] = paired(runs, config.rounds, config.seconds, rng)
    python = python_microseconds(config.rounds, config.calls, rng)
    show(rows, python)
    saved = {"models": rows, "python_microseconds": python}
    report.save(config.out, seed=config.seed, limit=1.0, bar=BAR, **saved)
    return rows


# The settings of each step of pipejax, and the step by hand that does the same.
STEPS: dict[str, dict[str, Any]] = {
    "width 1": {"width": 1},
    "width 2, plain": {"weight_prediction": False},
    "width 2, predicted": {"weight_prediction": "own"},
}
TWINS = {
    "width 1": "by hand, checked",
    "width 2, plain": "by hand, checked",
    "width 2, predicted": "by hand, predicted",
    "width 2, sharded optimizer": "by hand, checked",
}


def classifier(name: str, batch: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the loss, the parameters and the batch of an image classifier."""
    return of_model(models.build(name, num_classes=10), batch)


def of_model(model: nn.Module, batch: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the loss, the parameters and the batch of a Flax module."""
    params = model.init(jax.random.key(0), batch["image"][:1], train=True)["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["image"], train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses)

    return loss_fn, params, batch


def variants(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    mesh: Mesh,
    steps: Mapping[str, Mapping[str, Any]] = STEPS,
) -> dict[str, Run]:
    """Returns the variants of one training step, by name.

    They are the steps by hand, the steps of pipejax as a user calls them, and the
    compiled programs of these steps. `steps` has the names and the settings of the
    steps of pipejax.
    """
    tx = optax.adamw(1e-3)
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    params = jax.device_put(params, NamedSharding(mesh, P()))

    def looped(step: Callable[..., Any], start: tuple[Any, ...]) -> Run:
        """Returns a function that runs `*state, out = step(*state, batch)` n times."""
        state = list(start)

        def run(steps: int) -> None:
            nonlocal state
            for _ in range(steps):
                *state, out = step(*state, batch)
            jax.block_until_ready((state, out))

        run(3)  # compile
        return run

    def copied() -> tuple[Any, Any]:
        return jax.tree.map(jnp.copy, params), tx.init(params)

    runs = {
        title: looped(
            by_hand.synchronous(loss_fn, inner, mesh, donate=True, checks=checks),
            (jax.tree.map(jnp.copy, params), inner.init(params)),
        )
        for title, inner, checks in (
            ("by hand", tx, False),
            ("by hand, checked", tx, True),
            ("by hand, skipping", optax.apply_if_finite(tx, 1_000_000), False),
        )
    }
    predicted = by_hand.pipelined(loss_fn, tx, mesh, predicts=True, checks=True)
    stale = jax.tree.map(
        lambda x: jnp.zeros(
            (mesh.size * x.shape[0], *x.shape[1:]),
            x.dtype,
            device=NamedSharding(mesh, P("data")),
        ),
        params,
    )
    runs["by hand, predicted"] = looped(predicted, (*copied(), stale))
    for title, settings in steps.items():
        train = pj.make_train_step(loss_fn, tx, mesh=mesh, donate=True, **settings)
        runs[title] = looped(train.step, (train.init(params),))
        runs[f"{title}, program"] = looped(*compiled(train, params, batch))
    return runs


def compiled(
    train: pj.TrainStep, params: Any, batch: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the program of a step without the Python code around it, and its state.

    The width of the step must be 1 or 2.
    """
    state = train.init(params)
    program = train.lower(state, batch).compile()
    own = common_of(state), state.in_flight
    placed, split = laid_out(batch, train.config)
    inputs = Inputs(placed, None, InputSpecs(split))

    def step(own: Any, leaving: Any, _: Any) -> Any:
        return program(own, leaving, (), inputs)

    return step, own


def paired(
    runs: dict[str, Run], rounds: int, seconds: float, rng: np.random.Generator
) -> Any:
    """Measures the milliseconds of each variant, and its ratio to a step by hand.

    The ratio is taken in each round, and its quartiles are returned. Steps of pipejax
    are judged by the median ratio.
    """
    start = time.perf_counter()
    runs["by hand"](5)
    steps = max(1, round(5 * seconds / (time.perf_counter() - start)))
    times = interleaved(runs, rounds, steps, rng)
    found: dict[str, Any] = {}
    for name, values in times.items():
        twin = TWINS.get(name.removesuffix(", program"), "by hand")
        found[name] = {
            "ms_per_step": round(1e3 * statistics.median(values), 4),
            "twin": twin,
            "ratio": _spread([a / b for a, b in zip(values, times[twin], strict=True)]),
        }
    for name in TWINS.keys() & found.keys():
        found[name]["judged"] = judged(found, name)["ratio"]["median"]
        found[name]["met"] = found[name]["judged"] <= BAR
    return found


def judged(variants: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the ratios of a step to its twin by hand, or those of its program.

    Programs are compared if a step takes at most 10 ms.
    """
    short = variants[name]["ms_per_step"] <= 10
    return variants[f"{name}, program" if short else name]


def interleaved(
    runs: dict[str, Run], rounds: int, steps: int, rng: np.random.Generator
) -> dict[str, list[float]]:
    """Returns the seconds of a step of each variant, one number for each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in rng.permutation(list(runs)):
            start = time.perf_counter()
            runs[name](steps)
            times[name].append((time.perf_counter() - start) / steps)
    return times


def python_microseconds(
    rounds: int, calls: int, rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Measures how much longer a call of `train.step` takes than its program alone."""
    batch = {"image": np.ones((1, 1, 1, 1), np.float32), "label": np.zeros(1, np.int32)}
    problem = of_model(models.MLP(1, hidden=(1, 1)), batch)
    runs = variants(*problem, pj.data_mesh(1))
    pairs = {name: f"{name}, program" for name in STEPS}
    chosen = {name: runs[name] for pair in pairs.items() for name in pair}
    times = interleaved(chosen, rounds, calls, rng)
    return {
        name: _spread(
            [1e6 * (a - b) for a, b in zip(times[name], times[program], strict=True)]
        )
        for name, program in pairs.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = report.quartiles(values)
    return {"quartile 1": low, "median": middle, "quartile 3": high}


def table(models: dict[str, Any]) -> list[list[str]]:
    """Returns the table of steps over equivalent steps by hand."""
    checks = ["the check alone", "Optax's check"]
    rows = [["model", "by hand, ms", *STEPS, *checks]]
    for model, found in models.items():
        shown = [judged(found, name) for name in STEPS]
        shown += [found["by hand, checked"], found["by hand, skipping"]]
        ratios = (report.spread(row["ratio"].values()) for row in shown)
        rows.append([model, f"{found['by hand']['ms_per_step']:.1f}", *ratios])
    return rows


def show(rows: Any, python: Any) -> None:
    """Prints the table of all models, and the time of the Python code."""
    console = report.console(width=120)
    console.print(report.table("steps over steps by hand", table(rows)))
    for name, spread in python.items():
        low, middle, high = spread.values()
        console.print(
            f"{name}: Python adds {middle:.0f} ({low:.0f} - {high:.0f}) microseconds to"
            " a call of the compiled program"
        )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

"""What `train.step` costs beside a JAX step written by hand, on one device.

Bar: at width 1 and 2 a step takes at most 1.03 times a hand-written one. It is met
where compute is large beside the parameters, as in the CNN, and not by the MLP: what
pipejax adds (a bucket written and read, a check that it is finite, at width 2 the
weight prediction's update) grows with the parameters, not with the batch. The limit is
1.00: the compute is the same, one device has nobody to talk to. Beside it stands the
step by hand that also skips non-finite gradients, by `optax.apply_if_finite`.

Command: python -m experiments.overhead
Time: about 3 minutes on 2 cores.
Result: experiments/results/overhead.json
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.table import Table

import pipejax as pj

from . import models, report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the measurement."""

    models: tuple[str, ...] = ("mlp", "cnn")
    """On images of MNIST's and of CIFAR-10's shape."""
    batch_sizes: tuple[int, ...] = (64, 256, 1024, 4096)
    """Examples a step; the CNN stops at 64."""
    rounds: int = 15
    """Rounds; in each, every variant runs in turn, in an order of its own."""
    seconds: float = 0.5
    """How long a variant runs in a round."""
    seed: int = 0
    """Of the data and of the order."""
    out: pathlib.Path = report.RESULTS / "overhead.json"
    """Where the result goes."""


Run = Callable[[int], None]
SHAPES = {"mlp": (28, 28, 1), "cnn": (32, 32, 3)}
LARGEST = {"mlp": 4096, "cnn": 64}


def main(config: Config) -> dict[str, Any]:
    """Measures every model, prints a table, writes the result file."""
    rng = np.random.default_rng(config.seed)
    rows = {}
    for name, size in itertools.product(config.models, config.batch_sizes):
        if size > LARGEST[name]:
            continue
        batch = {
            "image": rng.normal(size=(size, *SHAPES[name])).astype(np.float32),
            "label": rng.integers(10, size=size).astype(np.int32),
        }
        rows[f"{name}, batch {size}"] = paired(variants(name, batch), config, rng)
    show(rows)
    report.save(config.out, seed=config.seed, limit=1.0, bar=1.03, models=rows)
    return rows


def variants(name: str, batch: Any) -> dict[str, Run]:
    """The same training step by hand, with and without a check, and by pipejax."""
    model = models.build(name, num_classes=10)
    params = model.init(jax.random.key(0), batch["image"][:1], train=True)["params"]
    tx = optax.adamw(1e-3)
    batch = jax.device_put(batch)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["image"], train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses)

    def by_hand(tx: optax.GradientTransformation) -> Run:
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return loop(step, (jax.tree.map(jnp.copy, params), tx.init(params)))

    def loop(step: Callable[[Any, Any], Any], state: Any) -> Run:
        def run(steps: int) -> None:
            nonlocal state
            for _ in range(steps):
                state, out = step(state, batch)
            jax.block_until_ready((state, out))

        run(3)  # compile
        return run

    mesh = pj.data_mesh(1)
    skipping = optax.apply_if_finite(tx, max_consecutive_errors=1_000_000)
    runs = {"by hand": by_hand(tx), "by hand, skipping": by_hand(skipping)}
    for width in (1, 2):
        train = pj.make_train_step(loss_fn, tx, mesh=mesh, width=width, donate=True)
        runs[f"width {width}"] = loop(train.step, train.init(params))
    return runs


def paired(runs: dict[str, Run], config: Config, rng: np.random.Generator) -> Any:
    """Milliseconds a step and, round by round, the ratio to the step by hand."""
    start = time.perf_counter()
    runs["by hand"](5)
    steps = max(1, round(5 * config.seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(config.rounds):
        for name in rng.permutation(list(runs)):
            start = time.perf_counter()
            runs[name](steps)
            times[name].append((time.perf_counter() - start) / steps)
    return {
        name: {
            "ms_per_step": round(1e3 * statistics.median(values), 3),
            "ratio": _spread(
                [a / b for a, b in zip(values, times["by hand"], strict=True)]
            ),
        }
        for name, values in times.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"quartile 1": low, "median": middle, "quartile 3": high}


def show(rows: Any) -> None:
    """Prints the table."""
    table = Table("model", "step", "ms", "ratio to by hand", "quartiles", "limit")
    for model, variants in rows.items():
        for name, row in variants.items():
            low, middle, high = row["ratio"].values()
            quartiles = f"{low:.3f} - {high:.3f}"
            ms = f"{row['ms_per_step']:.2f}"
            table.add_row(model, name, ms, f"{middle:.3f}", quartiles, "1.000")
    report.console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

"""Trains on the characters of Shakespeare as nanoGPT does, with and without a delay.

nanoGPT documents a configuration for CPUs, with a validation loss of 1.88
(https://github.com/karpathy/nanoGPT): 4 layers, 4 heads, width 128, batches of 12
sequences of 64 characters, 2,000 steps, no dropout, AdamW. The bar at K=1 is 1.88 plus
two standard errors, as a mean over three seeds and over the whole validation split;
nanoGPT's figure is an estimate from 20 batches. The bar at K=2 on four hosts is 0.01
nats more than at K=1, paired by seed, for AdamW and for Muon. Muon meets it; AdamW
misses both bars (docs/benchmarks/accuracy_sharded.md).

The learning rate rises for 100 steps to 1e-3 and falls as a cosine to 1e-4. AdamW has
b2 = 0.99 and decays matrices by 0.1. Muon takes the matrices of the layers at a rate of
up to 2e-2, and AdamW the rest. The norm of the gradient is clipped to 1.

Devices predict by their own gradients. On one device, a step of K=2 then predicts
exactly what synchronous training does, so it ends at the same loss. Four hosts are four
CPU devices of one process, which differ from four machines in time alone. Two hosts
with two devices each shard the model between these, and predict by the mean of six
sequences where a host with one device has three.

Command: python -m experiments.sharded.nanogpt --text FILE, with a copy of
tinyshakespeare's input.txt; runs that the result already has are kept
Time: 21 runs of about 4 minutes on 2 cores.
Result: experiments/results/sharded_nanogpt.json
"""

import dataclasses
import pathlib
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import pipejax as pj

from .. import report
from . import model

CONFIG = model.SIZES["nano"]
BATCH, STEPS, WARMUP = 12, 2000, 100
DOCUMENTED = 1.88


class Contender(NamedTuple):
    """An optimizer, a width, and the devices that train with them."""

    optimizer: str
    width: int
    hosts: int
    inner: int
    """The number of devices of each host, which shard the model."""


RUNS = [
    *(Contender("adamw", *setting) for setting in ((1, 1, 1), (1, 4, 1), (2, 4, 1))),
    Contender("adamw", 2, 2, 2),
    *(Contender("muon", *setting) for setting in ((1, 1, 1), (1, 4, 1), (2, 4, 1))),
]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the runs."""

    text: pathlib.Path
    """The text. Its first nine tenths are for training, and the rest for validation."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the parameters and of the batches."""
    steps: int = STEPS
    """Number of steps of a run."""
    out: pathlib.Path = report.RESULTS / "sharded_nanogpt.json"
    """File to write the result to, as JSON."""


def main(config: Config) -> list[dict[str, Any]]:
    """Runs what the result file lacks, and prints the table."""
    jax.config.update("jax_num_cpu_devices", 4)
    splits = characters(config.text.read_text())
    cells = report.kept(config.out)
    for seed in config.seeds:
        for contender in RUNS:
            key = contender._asdict() | {"seed": seed, "steps": config.steps}
            if any(key.items() <= cell.items() for cell in cells):
                continue
            loss = trained(splits, contender, seed, config.steps)
            cells.append({**key, **report.origin(), "loss": loss})
            print(*contender, f"seed {seed}: {loss:.4f}", flush=True)
            report.save(config.out, seed=seed, documented=DOCUMENTED, cells=cells)
    report.console(width=120).print(report.table("nanoGPT", rows(cells)))
    return cells


def characters(text: str) -> dict[str, np.ndarray]:
    """Returns the two splits as numbers of characters, in their sorted order."""
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = np.array([number[character] for character in text], np.int32)
    if len(alphabet) != CONFIG.vocabulary:
        raise ValueError(
            f"`text` must have {CONFIG.vocabulary} different characters, as"
            f" tinyshakespeare has; got {len(alphabet)}."
        )
    end = len(tokens) * 9 // 10
    return {"train": tokens[:end], "validation": tokens[end:]}


def optimizer_of(name: str, steps: int) -> optax.GradientTransformation:
    """Returns AdamW or Muon with nanoGPT's schedule, clipping and weight decay."""

    def rate(most: float) -> optax.Schedule:
        warmup = min(WARMUP, steps // 2)
        return optax.warmup_cosine_decay_schedule(0.0, most, warmup, steps, most / 10)

    if name == "adamw":
        tx = optax.adamw(rate(1e-3), b2=0.99, weight_decay=0.1, mask=matrices)
    else:
        tx = optax.contrib.muon(
            rate(2e-2),
            weight_decay=0.1,
            adam_b2=0.99,
            adam_learning_rate=rate(1e-3),
            muon_weight_dimension_numbers=of_layers,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def matrices(params: Any) -> Any:
    """Returns whether each array is a weight, and not the scale of a norm."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params
    )


def of_layers(params: Any) -> Any:
    """Returns which axes of the stacked weights of layers are input and output.

    The embedding, the positions and the scales of norms have none, and AdamW takes
    them.
    """

    def axes(path: Any, x: Any) -> optax.contrib.MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path)
        if "layers" not in name or "norm" in name:
            return None
        return optax.contrib.MuonDimensionNumbers(1, -1)

    return jax.tree_util.tree_map_with_path(axes, params)


def trained(
    splits: dict[str, np.ndarray], contender: Contender, seed: int, steps: int
) -> float:
    """Returns the loss on the whole validation split after training."""
    optimizer, width, hosts, inner = contender
    graph, params = model.init(CONFIG, seed)
    if inner == 1:
        mesh = pj.data_mesh(hosts, axis_name="host")
    else:
        mesh = pj.data_mesh(hosts * inner, axis_name=("host", "fsdp"), hosts=hosts)
        params = jax.device_put(params, model.shardings(params, mesh))
    loss_fn = model.loss_fn(graph)
    train = pj.make_train_step(
        loss_fn,
        optimizer_of(optimizer, steps),
        mesh=mesh,
        axis_name="host",
        width=width,
        weight_prediction="own",
    )
    state, rng = train.init(params), np.random.default_rng(seed)
    for _ in range(steps):
        tokens = splits["train"]
        starts = rng.integers(len(tokens) - CONFIG.context - 1, size=BATCH)
        window = np.arange(CONFIG.context + 1)
        state, _ = train.step(state, tokens[starts[:, None] + window[None]])
    state, _ = train.drain(state)
    end, length = jax.device_get(state.params), CONFIG.context
    return validation_loss(loss_fn, end, splits["validation"], length)


def validation_loss(
    loss_fn: Any, params: Any, tokens: np.ndarray, length: int
) -> float:
    """Returns the mean loss over all windows of the split, which do not overlap."""
    count = (len(tokens) - 1) // length
    windows = np.stack(
        [tokens[i * length : (i + 1) * length + 1] for i in range(count)]
    )
    loss = jax.jit(loss_fn)
    parts = np.array_split(windows, -(-count // 64))
    sums = [len(part) * float(loss(params, jnp.asarray(part))) for part in parts]
    return sum(sums) / count


def rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Returns titles, then a row for each contender: mean and standard error."""
    found = [
        [
            "optimizer",
            "K",
            "hosts",
            "devices a host",
            "seeds",
            "loss, nats",
            "more than K=1 on four hosts, paired",
        ]
    ]
    for contender in RUNS:
        own = losses(cells, contender)
        twin = losses(cells, Contender(contender.optimizer, 1, 4, 1))
        pairs = [own[seed] - twin[seed] for seed in own.keys() & twin.keys()]
        if not own:
            continue
        known = contender.width > 1 and pairs
        against = f"{statistics.mean(pairs):+.4f}" if known else ""
        found.append(
            [
                *map(str, (*contender, len(own))),
                f"{statistics.mean(own.values()):.4f} ± {standard_error(own):.4f}",
                against,
            ]
        )
    return found


def losses(cells: list[dict[str, Any]], contender: Contender) -> dict[int, float]:
    """Returns the loss of each seed of a contender."""
    wanted = contender._asdict().items()
    return {cell["seed"]: cell["loss"] for cell in cells if wanted <= cell.items()}


def standard_error(of_seeds: dict[int, float]) -> float:
    """Returns the standard error of the mean over seeds; 0 for a single one."""
    if len(of_seeds) < 2:
        return 0.0
    return statistics.stdev(of_seeds.values()) / len(of_seeds) ** 0.5


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

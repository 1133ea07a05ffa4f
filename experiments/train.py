"""Trains an image classifier with Pipe-SGD: any width, any of four data sets and more.

Claim: with AdamW, width 2 reaches the accuracy of synchronous training, width 1
(`experiments.convergence` has three seeds of it).

Command: python -m experiments.train --cpu-devices 4
         python -m experiments.train --data mnist --data-dir ~/tensorflow_datasets
Time: the first about 20 seconds on 2 cores, for about 97 % on digits.

A run keeps everything in its folder: config.json, metrics.jsonl, TensorBoard scalars,
curves.png, result.json and checkpoints. Killed at any moment and started again with
`--resume`, it ends with the same bits. SIGTERM saves and exits.
"""

import dataclasses
import json
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

import pipejax as pj
from pipejax import checkpoint

from . import data, exchange, logs, loop, models, report, task

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run."""

    data: str = "digits"
    """digits (bundled), or a TFDS name: mnist, cifar10, cifar100, imagenet2012, ..."""
    data_dir: pathlib.Path | None = None
    """Where TFDS data sets lie; by default TFDS's own folder."""
    augment: bool = False
    """Random crops and flips."""
    model: Literal["mlp", "cnn", "resnet18"] = "mlp"
    """The network."""
    norm: Literal["group", "batch"] = "group"
    """Normalisation of resnet18."""
    dropout: float = 0.0
    """Dropout rate of mlp and cnn."""
    width: int = 2
    """Pipeline width K: 1 is synchronous, 2 is Pipe-SGD."""
    weight_prediction: bool = True
    """Take gradients where those in flight would lead."""
    warmup_steps: int = 0
    """Synchronous steps before the pipeline starts."""
    microbatches: int = 1
    """Parts of a device's batch, run one after another."""
    compute_dtype: Dtype = "float32"
    """Of forward and backward pass."""
    reduce_dtype: Dtype = "float32"
    """Of what travels, and is summed."""
    all_reduce: exchange.Algorithm = "psum"
    """How it is summed."""
    codec: exchange.Codec = "none"
    """How it is compressed: under psum, power_sgd or random_k."""
    feedback: bool = False
    """Send later what the codec loses."""
    optimizer: task.Optimizer = "adamw"
    """sgd, momentum (0.9) or adamw."""
    learning_rate: float = 1e-3
    """Constant."""
    weight_decay: float = 1e-4
    """Decoupled in adamw, L2 in the others."""
    clip_norm: float | None = None
    """Global norm at which the reduced gradient is clipped."""
    batch_size: int = 64
    """Global, over all devices."""
    steps: int = 1000
    """In all."""
    seed: int = 0
    """Of the parameters, the order of the data and dropout."""
    devices: int | None = None
    """How many; by default all."""
    cpu_devices: int | None = None
    """Run on so many virtual CPU devices."""
    log_every: int = 20
    """Steps."""
    test_every: int = 100
    """Steps."""
    checkpoint_every: int = 200
    """Steps; 0 saves only at the end."""
    out: pathlib.Path = pathlib.Path("runs/train")
    """Folder of the run."""
    resume: bool = False
    """Go on from the last checkpoint in `out`."""


# What may differ between a run and its resumption without changing what it computes.
_FREE = {"data_dir", "devices", "cpu_devices", "log_every", "test_every", "out"}
_FREE |= {"checkpoint_every", "resume", "steps"}


def run(config: Config, console: Console) -> dict[str, Any]:
    """Trains, tests, saves; returns what `result.json` holds."""
    _claim_folder(config)
    dataset = data.load(config.data, data_dir=config.data_dir)
    train, state, test = _build(config, dataset)
    batches = data.train_batches(
        dataset,
        batch_size=config.batch_size,
        seed=config.seed,
        augment=config.augment,
    )
    with checkpoint.manager(config.out / "checkpoints") as manager:
        start = 0
        if config.resume and manager.latest_step() is not None:
            restored = checkpoint.restore(manager, train, state)
            state, start = restored.state, int(restored.state.step)
            batches.set_state(restored.extras)
            console.print(f"resumed at step {start}")
            if restored.drained:
                console.print("other device count: gradients in flight were applied")
        with logs.Log(config.out, start) as log:
            outcome = loop.run(
                train,
                state,
                batches,
                loop.Schedule(
                    config.steps,
                    config.log_every,
                    config.test_every,
                    config.checkpoint_every,
                ),
                test=test,
                manager=manager,
                log=log,
                console=console,
                label=f"{config.data} K={config.width}",
            )
            if outcome.terminated:
                step = int(outcome.state.step)
                console.print(f"stopped by SIGTERM, saved at step {step}")
                return {"stopped": step}
            state, _ = train.drain(outcome.state)
            result = test(state)
            log.write(config.steps, result)
    logs.draw_curves({f"width {config.width}": config.out}, config.out / "curves.png")
    result |= _summary(config, train, state, dataset, outcome.steps_per_second)
    report.save(config.out / "result.json", **result)
    return result


def _build(config: Config, dataset: data.Dataset) -> tuple[Any, Any, Any]:
    """Train step, first state and test of a configuration."""
    model = models.build(
        config.model,
        num_classes=dataset.num_classes,
        norm=config.norm,
        dropout=config.dropout,
    )
    train = pj.make_train_step(
        task.make_loss(model),
        task.make_optimizer(
            config.optimizer,
            config.learning_rate,
            config.weight_decay,
            config.clip_norm,
        ),
        mesh=pj.data_mesh(config.devices),
        width=config.width,
        warmup_steps=config.warmup_steps,
        weight_prediction=config.weight_prediction,
        microbatches=config.microbatches,
        compute_dtype=_other_than_float32(config.compute_dtype),
        reduce_dtype=_other_than_float32(config.reduce_dtype),
        donate=True,
        all_reduce=exchange.make_all_reduce(
            config.all_reduce, config.codec, config.feedback
        ),
    )
    key, rng = jax.random.split(jax.random.key(config.seed))
    image = jnp.zeros((1, *dataset.image_shape))
    variables = dict(model.init(key, image, train=False))
    state = train.init(
        variables.pop("params"),
        model_state=variables or None,
        rng=rng,
        batch=batch_shape(config, dataset),
    )
    evaluate = task.make_test(model)

    def test(state: pj.PipelineState) -> dict[str, float]:
        batches = data.test_batches(dataset, batch_size=min(512, len(dataset.test)))
        return evaluate(state.params, batches, state.model_state)

    return train, state, test


def batch_shape(config: Config, dataset: data.Dataset) -> dict[str, Any]:
    """Shapes and dtypes of one global batch."""
    shape = (config.batch_size, *dataset.image_shape)
    return {
        "image": jax.ShapeDtypeStruct(shape, jnp.float32),
        "label": jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    }


def _other_than_float32(name: Dtype) -> Any:
    return None if name == "float32" else jnp.dtype(name)


def _summary(
    config: Config, train: pj.TrainStep, state: Any, dataset: Any, rate: float
) -> dict[str, Any]:
    """What the run was, what it sent, and the bits it ended with."""
    (digest,) = set(pj.replica_digest(state.params).values())
    transfers = train.transfers(state, batch_shape(config, dataset))
    return {
        "seed": config.seed,
        "width": config.width,
        "steps": int(state.step),
        "skipped": int(state.skipped),
        "executor": f"{train.executor.name}: {train.executor.reason}",
        "steps_per_second": rate,
        "collectives": [transfer.kind for transfer in transfers],
        "bytes_sent": sum(transfer.wire_bytes for transfer in transfers),
        "params_digest": digest,
        "note": dataset.note,
    }


def _claim_folder(config: Config) -> None:
    """Makes the folder of the run, or checks that it is this run's."""
    path = config.out / "config.json"
    settings = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in _FREE
    }
    if path.exists():
        before = json.loads(path.read_text())
        differing = sorted(k for k in settings if settings[k] != before.get(k))
        if not config.resume:
            raise FileExistsError(
                f"`out` must be a new folder, got {config.out}, which holds a run. Go"
                " on with --resume, or choose another --out."
            )
        if differing:
            changes = {k: (before.get(k), settings[k]) for k in differing}
            raise ValueError(
                f"`resume` must keep the run's settings, got (before, now) {changes}."
                " Give the same flags, or choose another --out."
            )
    config.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main(config: Config) -> dict[str, Any]:
    """Chooses the devices, runs, prints the result."""
    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    console = report.console()
    result = run(config, console)
    console.print_json(data=result)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

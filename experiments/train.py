"""Trains an image classifier with Pipe-SGD, at any width and on many data sets.

Claim: with AdamW, width 2 reaches the accuracy of synchronous training, which is width
1. `experiments.convergence` shows this for three seeds.

Command: python -m experiments.train --cpu-devices 4
         python -m experiments.train --data mnist --data-dir ~/tensorflow_datasets
Time: the first about 20 seconds on 2 cores, for about 97 % on digits.

A run keeps everything in its folder: config.json, metrics.jsonl, TensorBoard scalars,
curves.png, result.json and checkpoints. A run that is killed at any moment and started
again with `--resume` ends with the same bits. SIGTERM makes a run save and exit.
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
    """Settings of one training run."""

    data: str = "digits"
    """Name of the data set: digits (bundled), or a TFDS name such as mnist, cifar10,
    cifar100 or imagenet2012."""
    data_dir: pathlib.Path | None = None
    """Folder of TFDS data sets. By default $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    augment: bool = False
    """Augment the images by random crops and flips."""
    model: Literal["mlp", "cnn", "resnet18"] = "mlp"
    """Network to train."""
    norm: Literal["group", "batch"] = "group"
    """Norm layers of resnet18. The other models have none."""
    dropout: float = 0.0
    """Dropout rate of mlp and cnn. resnet18 has no dropout."""
    width: int = 2
    """Pipeline width K. 1 is synchronous training, 2 is Pipe-SGD."""
    weight_prediction: bool = True
    """Take gradients at a prediction: the parameters after the updates in flight."""
    warmup_steps: int = 0
    """Number of synchronous steps before the pipeline starts."""
    microbatches: int = 1
    """Number of parts of the batch of a device, which run one after another."""
    compute_dtype: Dtype = "float32"
    """Data type of the forward and the backward pass."""
    reduce_dtype: Dtype = "float32"
    """Data type in which gradients are sent and summed."""
    all_reduce: exchange.Algorithm = "psum"
    """Algorithm of the all-reduce."""
    codec: exchange.Codec = "none"
    """Codec of the gradients. With psum, it must be none, power_sgd or random_k. The
    codec power_sgd works only with psum, tree and parameter_server."""
    feedback: bool = False
    """Use error feedback: what the codec loses is sent later."""
    optimizer: task.Optimizer = "adamw"
    """Optimizer: sgd, momentum (SGD with momentum 0.9) or adamw."""
    learning_rate: float = 1e-3
    """Learning rate, which is constant."""
    weight_decay: float = 1e-4
    """Weight decay, decoupled in adamw and L2 in the others."""
    clip_norm: float | None = None
    """Global norm at which the reduced gradient is clipped. By default, it is not."""
    batch_size: int = 64
    """Examples in a batch, over all devices."""
    steps: int = 1000
    """Number of steps of the run, including those before it was resumed."""
    seed: int = 0
    """Seed of the parameters, the order of the data, augmentation and dropout."""
    devices: int | None = None
    """Number of devices to use. By default, all are used."""
    cpu_devices: int | None = None
    """Run on this number of virtual CPU devices."""
    log_every: int = 20
    """Number of steps between lines of the log."""
    test_every: int = 100
    """Number of steps between tests."""
    checkpoint_every: int = 200
    """Number of steps between checkpoints. With 0, the run saves only at its end."""
    out: pathlib.Path = pathlib.Path("runs/train")
    """Folder of the run."""
    resume: bool = False
    """Continue from the last checkpoint in `out`."""


# Settings that may change when a run is resumed: they do not define what it computes.
_FREE = {"data_dir", "devices", "cpu_devices", "log_every", "test_every", "out"}
_FREE |= {"checkpoint_every", "resume", "steps"}


def run(config: Config, console: Console) -> dict[str, Any]:
    """Trains, tests and saves one run.

    Returns:
      The figures of `result.json`. If a SIGTERM has stopped the run, only the step at
      which it was saved.
    """
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
    """Makes the train step, the first state and the test of a configuration."""
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
    """Returns the shapes and dtypes of one global batch."""
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
    """Returns the run's settings, what a step sent, and a digest of the parameters."""
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
    """Makes the folder of the run, or checks that it belongs to this run."""
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
    """Chooses the devices, trains, and prints the result."""
    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    console = report.console()
    result = run(config, console)
    console.print_json(data=result)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

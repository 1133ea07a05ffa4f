"""Trains a small GPT (Flax NNX) on several processes, with all that a long run needs.

The tokens are the bytes of a file. Without `--text`, sentences are generated. Started
again, the program continues from its last checkpoint.
"""

import dataclasses
import itertools
import pathlib

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from gpt import GPT, loss_fn
from jax.experimental import multihost_utils

import pipejax as pj
import pipejax.flax.nnx
from pipejax import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    folder: str = "run"
    text: str = ""
    project: str = ""  # of Weights & Biases; without it, the log is printed
    hosts: int = 1  # machines, which may run several processes each
    steps: int = 2000
    part: int = 16  # sequences of each process in a batch
    length: int = 64
    layers: int = 4
    width: int = 128
    rate: float = 1e-3
    decay: float = 0.99  # of the average of the weights
    log: int = 50
    test: int = 500  # batches between evaluations, and between checkpoints


def tokens(path):
    """Returns the bytes to train on, and those to test on."""
    words = np.random.default_rng(0).choice(["a ship ", "the sea ", "sails "], 9999)
    text = pathlib.Path(path).read_bytes() if path else "".join(words).encode()
    found = np.frombuffer(text, np.uint8).astype(np.int32)
    return np.split(found, [len(found) * 9 // 10])


def parts(text, config):
    """Returns an iterator over this process's parts, which threads read ahead."""
    data = grain.MapDataset.range(len(text) - config.length).seed(0).shuffle().repeat()
    data = data[jax.process_index() :: jax.process_count()]
    data = data.map(lambda start: text[start : start + config.length + 1])
    return iter(data.batch(config.part).to_iter_dataset())


def with_ema(tx, decay):
    """Keeps an average of the parameters in the state of the optimizer."""

    def init(params):
        return tx.init(params), jax.tree.map(jnp.copy, params)

    def update(gradients, state, params):
        updates, inner = tx.update(gradients, state[0], params)
        after = optax.apply_updates(params, updates)
        return updates, (inner, optax.incremental_update(after, state[1], 1 - decay))

    return optax.GradientTransformation(init, update)


def logger(config):
    """Returns a function that logs numbers on process 0."""
    if jax.process_index() != 0:
        return lambda found, step: None
    if config.project:
        import wandb

        # A job that is started again goes on with its run.
        name = pathlib.Path(config.folder).resolve().name
        return wandb.init(project=config.project, id=name, resume="allow").log
    return lambda found, step: print(step, *(f"{k} {v:.4f}" for k, v in found.items()))


def main(config):
    pj.launch.initialize(config=vars(config))  # before anything asks for a device
    text, test = tokens(config.text)
    shape = config.length, config.layers, config.width
    model = GPT(*shape, rngs=nnx.Rngs(0))  # the same on all processes
    pure_loss, params, model_state = pj.flax.nnx.split(model, loss_fn)
    steps = config.steps
    rate = optax.warmup_cosine_decay_schedule(0, config.rate, steps // 10, steps)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    # Eight bits between hosts, and uncompressed inside them.
    between = pj.collectives.two_shot(pj.codecs.int8())
    train = pj.make_train_step(
        pure_loss,
        with_ema(tx, config.decay),
        mesh=pj.data_mesh(axis_name=("host", "device"), hosts=config.hosts),
        axis_name=("host", "device"),
        all_reduce=pj.collectives.hierarchical(outer=between),
        compute_dtype=jnp.bfloat16,
        width=2,
        donate=True,
    )
    state, batches = train.init(params, model_state=model_state), parts(text, config)
    recent, test_loss, write = [], nnx.jit(loss_fn), logger(config)

    def tested(params):
        nnx.update(model, params)
        some = map(train.batch, itertools.islice(parts(test, config), 20))
        return np.mean([float(test_loss(model, part)) for part in some])

    def save():
        checkpoint.save(manager, state, {"data": batches.get_state()})

    with (
        pj.launch.Watchdog(limit=60.0) as watchdog,
        checkpoint.manager(config.folder) as manager,
    ):
        if manager.latest_step() is not None:
            restored = checkpoint.restore(manager, train, state)
            state, recent = restored.state, [*restored.infos]
            batches.set_state(restored.extras["data"])
        for step in range(int(state.step), config.steps):
            watchdog.step(step)
            if multihost_utils.reached_preemption_sync_point(step):  # after SIGTERM
                if manager.latest_step() != step:
                    save()
                return
            state, info = train.step(state, train.batch(next(batches)))
            recent, done = [*recent, info], step + 1
            if done % config.log == 0:  # the last info is of batch `step`, from 1
                mean, recent = pj.mean_info(recent), []
                found = {"loss": mean.loss, "norm": mean.grad_norm}
                write(found | {"rate": rate(step - 1)}, step=step)
            if done % config.test == 0 or done == config.steps:
                state, late = train.drain(state)
                recent += late
                with watchdog.pause("evaluation"):
                    found = {"test loss": tested(state.params)}
                    found["test loss of the average"] = tested(state.opt_state[1])
                write(found, step=done)
                save()


if __name__ == "__main__":
    main(tyro.cli(Config))

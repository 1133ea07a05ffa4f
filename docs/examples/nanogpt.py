"""Trains a small GPT (Flax NNX) on several processes, with all that a long run needs.

On one machine, and on four hosts with two processes and eight GPUs each:

    pipejax launch --processes 2 -- python nanogpt.py --text input.txt
    srun -N 4 --ntasks-per-node 2 --gpus-per-task 4 --gpu-bind none \\
        pipejax launch --max-restarts 3 -- python nanogpt.py --hosts 4 --text input.txt

The tokens are the bytes of a file. Without `--text`, sentences are generated. Started
again, the program continues from its last checkpoint.
"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.experimental import multihost_utils

import pipejax as pj
import pipejax.flax.nnx
from pipejax import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    folder: str = "run"
    text: str = ""
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


def part_at(number, text, config):
    """Returns this process's part of a batch. It depends on the number alone."""
    rng = np.random.default_rng((number, jax.process_index()))
    starts = rng.integers(len(text) - config.length, size=(config.part, 1))
    return text[starts + np.arange(config.length + 1)[None]]


class Block(nnx.Module):
    def __init__(self, n, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(4, n, decode=False, rngs=rngs)
        self.up = nnx.Linear(n, 4 * n, rngs=rngs)
        self.down = nnx.Linear(4 * n, n, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attend(self.norms[0](x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, config, *, rngs):
        self.tokens = nnx.Embed(256, config.width, rngs=rngs)
        self.places = nnx.Embed(config.length, config.width, rngs=rngs)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        blocks = [Block(config.width, rngs=rngs) for _ in range(config.layers)]
        self.blocks = nnx.List(blocks)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))[None]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


def loss_fn(model, batch):
    logits = model(batch[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.mean()


def with_ema(tx, decay):
    """Keeps an average of the parameters in the state of the optimizer."""

    def init(params):
        return tx.init(params), jax.tree.map(jnp.copy, params)

    def update(gradients, state, params):
        updates, inner = tx.update(gradients, state[0], params)
        after = optax.apply_updates(params, updates)
        return updates, (inner, optax.incremental_update(after, state[1], 1 - decay))

    return optax.GradientTransformation(init, update)


def write(scalars, step):
    """Logs on process 0. With Weights & Biases, call `wandb.log(scalars, step)`."""
    if jax.process_index() == 0:
        print(step, *(f"{name} {value:.4f}" for name, value in scalars.items()))


def main(config):
    pj.launch.initialize(config=vars(config))  # before anything asks for a device
    text, test = tokens(config.text)
    model = GPT(config, rngs=nnx.Rngs(0))  # the same on all processes
    pure_loss, params, model_state = pj.flax.nnx.split(model, loss_fn)
    rate = optax.warmup_cosine_decay_schedule(0, config.rate, 100, config.steps + 100)
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
        width=2,
        donate=True,
    )
    state = train.init(params, model_state=model_state)
    recent, test_loss = [], nnx.jit(loss_fn)

    def tested(params):
        nnx.update(model, params)
        parts = (train.batch(part_at(n, test, config)) for n in range(20))
        return np.mean([float(test_loss(model, part)) for part in parts])

    with (
        pj.launch.Watchdog(limit=60.0) as watchdog,
        checkpoint.manager(config.folder) as manager,
    ):
        if manager.latest_step() is not None:
            restored = checkpoint.restore(manager, train, state)
            state, recent = restored.state, [*restored.infos]
        for step in range(int(state.step), config.steps):
            watchdog.step(step)
            if multihost_utils.reached_preemption_sync_point(step):  # after SIGTERM
                if manager.latest_step() != step:
                    checkpoint.save(manager, state)
                sys.exit()
            part = part_at(step, text, config)
            state, info = train.step(state, train.batch(part))
            recent, done = [*recent, info], step + 1
            if done % config.log == 0:
                mean, recent = pj.mean_info(recent), []
                # The batch that arrived last has the number `step`, from 1.
                found = {"loss": mean.loss, "norm": mean.grad_norm}
                write(found | {"rate": rate(step - 1)}, step=step)
            if done % config.test == 0 or done == config.steps:
                state, late = train.drain(state)
                recent += late
                with watchdog.pause("evaluation"):
                    found = {"test loss": tested(state.params)}
                    found["test loss of the average"] = tested(state.opt_state[1])
                write(found, step=done)
                checkpoint.save(manager, state)


if __name__ == "__main__":
    main(tyro.cli(Config))

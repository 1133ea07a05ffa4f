"""Fine-tunes low-rank adapters (LoRA) of a small transformer on several processes.

    pipejax launch --processes 2 -- python lora.py --folder run

The model continues sequences such as 3, 5, 7, 9: each number is the one before plus a
step, modulo 32. All of its parameters are trained on steps of 1, 2 and 3, and then the
adapters alone on steps of 5. Only what is trained is sent. At the end, the adapters are
saved without the model.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import pipejax as pj
import pipejax.flax.nnx

VOCABULARY, LENGTH = 32, 12


@dataclasses.dataclass(frozen=True)
class Config:
    folder: str = "run"
    width: int = 64
    rank: int = 4
    layers: int = 2
    part: int = 32  # sequences of each process in a batch
    before: int = 150  # batches for all parameters
    after: int = 100  # batches for the adapters


class Block(nnx.Module):
    def __init__(self, config, *, rngs):
        n = config.width

        def linear(inputs, outputs):
            return nnx.LoRALinear(inputs, outputs, lora_rank=config.rank, rngs=rngs)

        self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = linear(n, 3 * n), linear(n, n)
        self.up, self.down = linear(n, 4 * n), linear(4 * n, n)

    def __call__(self, x):
        heads = (*x.shape[:2], 3, 4, -1)
        q, k, v = jnp.moveaxis(self.qkv(self.norms[0](x)).reshape(heads), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, config, *, rngs):
        self.tokens = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.places = nnx.Embed(LENGTH, config.width, rngs=rngs)
        blocks = [Block(config, rngs=rngs) for _ in range(config.layers)]
        self.blocks = nnx.List(blocks)
        self.logits = nnx.Linear(config.width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(LENGTH))[None]
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses[:, 2:].mean()  # the first numbers do not show the step yet


def part_at(number, steps, size):
    """Returns this process's part of a batch. Put the reader of your data here."""
    rng = np.random.default_rng((number, jax.process_index()))
    first, step = rng.integers(VOCABULARY, size=size), rng.choice(steps, size)
    every = first[:, None] + step[:, None] * np.arange(LENGTH + 1)[None]
    return every % VOCABULARY


def fit(model, wrt, steps, batches, config):
    """Trains the variables `wrt`. Returns the bytes of a step, and two losses."""
    pure_loss_fn, params, model_state = pj.flax.nnx.split(model, loss_fn, wrt=wrt)
    train = pj.make_train_step(pure_loss_fn, optax.adamw(1e-2), mesh=pj.data_mesh())
    first = train.batch(part_at(0, steps, config.part))
    # The batch shows which variables the loss leaves as they are: these are not sent.
    state = train.init(params, model_state=model_state, batch=first)
    sent = sum(transfer.bytes for transfer in train.transfers(state, first))
    infos = []
    for number in range(batches):
        batch = train.batch(part_at(number, steps, config.part))
        state, info = train.step(state, batch)
        infos.append(info)
    state, late = train.drain(state)
    pj.flax.nnx.update(model, state)
    losses = [float(info.loss) for info in (*infos[1:], *late)]
    return sent, losses[0], losses[-1]


def main(config):
    pj.launch.initialize(config=vars(config))  # before anything asks for a device
    say = print if jax.process_index() == 0 else lambda text: None
    model = Transformer(config, rngs=nnx.Rngs(0))  # the same on all processes

    sent, first, last = fit(model, nnx.Param, (1, 2, 3), config.before, config)
    say(f"all parameters: {sent:,} bytes a step, loss {first:.2f} -> {last:.2f}")
    sent, first, last = fit(model, nnx.LoRAParam, (5,), config.after, config)
    say(f"adapters alone: {sent:,} bytes a step, loss {first:.2f} -> {last:.2f}")

    if jax.process_index() == 0:
        pathlib.Path(config.folder).mkdir(parents=True, exist_ok=True)
        adapters = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
        found = jax.tree_util.tree_leaves_with_path(adapters)
        named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}
        np.savez(pathlib.Path(config.folder) / "adapters.npz", **named)


if __name__ == "__main__":
    main(tyro.cli(Config))

"""Trains a transformer (Flax NNX) that the devices of each host shard (HSDP, ZeRO-1).

Inside a host, the devices shard the parameters (FSDP). Between hosts, the exchange of
gradients is hidden, and each host keeps its share of the optimizer (ZeRO-1).

The tokens are the bytes of a file. Without `--text`, sentences are generated. Started
again, the program continues from its last checkpoint.
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
from pipejax import checkpoint

AXES = ("host", "fsdp")


@dataclasses.dataclass(frozen=True)
class Config:
    folder: str = "run"
    text: str = ""
    steps: int = 2000
    part: int = 32  # sequences of each host in a batch, a multiple of its devices
    length: int = 64
    layers: int = 4
    width: int = 128
    rate: float = 1e-3
    test: int = 500  # batches between evaluations, and between checkpoints


def tokens(path):
    """Returns the bytes to train on, and those to test on."""
    words = np.random.default_rng(0).choice(["a ship ", "the sea ", "sails "], 9999)
    text = pathlib.Path(path).read_bytes() if path else "".join(words).encode()
    found = np.frombuffer(text, np.uint8).astype(np.int32)
    return np.split(found, [len(found) * 9 // 10])


def batch_at(number, text, train, config):
    """Returns a batch, whose parts depend on its number and on the process alone."""
    rng = np.random.default_rng((number, jax.process_index()))
    starts = rng.integers(len(text) - config.length, size=(config.part, 1))
    part = text[starts + np.arange(config.length + 1)[None]]
    return train.batch(part, axis_name=AXES)


def linear(inputs, outputs, spec, rngs):
    made = nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
    return nnx.Linear(inputs, outputs, kernel_init=made, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, n, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(n, rngs=rngs) for _ in range(2)])
        self.qkv = linear(n, 3 * n, ("fsdp", None), rngs)
        self.out = linear(n, n, (None, "fsdp"), rngs)
        self.up = linear(n, 4 * n, ("fsdp", None), rngs)
        self.down = linear(4 * n, n, (None, "fsdp"), rngs)

    def __call__(self, x):
        heads = (*x.shape[:2], 3, 4, -1)
        q, k, v = jnp.moveaxis(self.qkv(self.norms[0](x)).reshape(heads), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, config, *, rngs):
        split = nnx.with_partitioning(nnx.initializers.normal(0.02), (None, "fsdp"))
        self.tokens = nnx.Embed(256, config.width, embedding_init=split, rngs=rngs)
        self.places = nnx.Embed(config.length, config.width, rngs=rngs)
        blocks = [Block(config.width, rngs=rngs) for _ in range(config.layers)]
        self.blocks = nnx.List(blocks)
        self.logits = linear(config.width, 256, ("fsdp", None), rngs)

    def __call__(self, tokens, rows):
        def split(x):  # by the axes of the batch; otherwise XLA may sum activations
            return jax.lax.with_sharding_constraint(x, jax.P(rows))

        x = split(self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))[None])
        for block in self.blocks:
            x = split(block(x))
        return split(self.logits(x))


def loss_fn(model, batch, rows="fsdp"):  # a host sees its own share
    logits = model(batch[:, :-1], rows).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.mean()


def main(config):
    pj.launch.initialize(config=vars(config))  # before anything asks for a device
    text, test = tokens(config.text)
    mesh = pj.data_mesh(axis_name=AXES)  # a row of devices for each process

    @nnx.jit
    def create():  # no device ever holds the whole model
        model = Transformer(config, rngs=nnx.Rngs(0))
        specs = nnx.get_partition_spec(variables := nnx.state(model))
        nnx.update(model, jax.lax.with_sharding_constraint(variables, specs))
        return model

    with jax.set_mesh(mesh):
        model = create()
    pure_loss, params, model_state = pj.flax.nnx.split(model, loss_fn)
    train = pj.make_train_step(
        pure_loss,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.rate)),
        mesh=mesh,
        axis_name="host",
        width=2,
        shard_optimizer=True,
        compute_dtype=jnp.bfloat16,
        donate=True,
    )
    state, infos = train.init(params, model_state=model_state), []

    test_loss = nnx.jit(lambda *given: loss_fn(*given, AXES))  # all hosts together
    with checkpoint.manager(config.folder) as manager:
        if manager.latest_step() is not None:
            state = checkpoint.restore(manager, train, state).state
        for step in range(int(state.step), config.steps):
            state, info = train.step(state, batch_at(step, text, train, config))
            infos.append(info)
            if (step + 1) % config.test == 0 or step + 1 == config.steps:
                state, late = train.drain(state)
                loss, infos = pj.mean_info([*infos, *late]).loss, []
                # Gathers the shares of hosts, in float32. Devices still shard.
                nnx.update(model, train.whole_params(state))
                with jax.set_mesh(mesh):
                    some = (batch_at(n, test, train, config) for n in range(8))
                    tested = np.mean([float(test_loss(model, each)) for each in some])
                if jax.process_index() == 0:
                    print(f"{step + 1}: loss {loss:.4f}, test loss {tested:.4f}")
                checkpoint.save(manager, state)


if __name__ == "__main__":
    main(tyro.cli(Config))

"""Trains a CNN with batch norm (Flax Linen) on CIFAR-10, with checkpoints.

    python cifar10.py --folder run --data ~/tensorflow_datasets/cifar10/3.0.2

The data is a version of CIFAR-10 that TensorFlow Datasets has prepared with
`file_format="array_record"`. Without it, the images are generated. Started again, the
program continues after the last epoch that it has saved.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn

import pipejax as pj
from pipejax import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    folder: str = "run"
    data: str = ""
    epochs: int = 20
    batch: int = 256  # examples of all devices together
    features: int = 64
    rate: float = 0.1


def load(split, folder):
    """Returns images of bytes, and their labels."""
    if not folder:  # ten random images, with noise
        rng = np.random.default_rng(split == "test")
        labels = rng.integers(10, size=1_024 if split == "train" else 256)
        clean = np.random.default_rng(2).uniform(0, 255, size=(10, 32, 32, 3))[labels]
        noisy = np.clip(clean + rng.normal(0, 64, clean.shape), 0, 255)
        return {"image": noisy.astype(np.uint8), "label": labels}
    import tensorflow_datasets as tfds

    source = tfds.builder_from_directory(folder).as_data_source(split)
    examples = [source[index] for index in range(len(source))]
    return {
        "image": np.stack([example["image"] for example in examples]),
        "label": np.array([example["label"] for example in examples]),
    }


def batches(data, size, epoch):
    """Yields the batches of an epoch. Half of the images are mirrored."""
    rng = np.random.default_rng(epoch)
    order = rng.permutation(len(data["label"]))
    for end in range(size, len(order) + 1, size):
        rows = order[end - size : end]
        images = data["image"][rows]
        mirrored = rng.random((size, 1, 1, 1)) < 0.5
        images = np.where(mirrored, images[:, :, ::-1], images)
        yield {"image": images, "label": data["label"][rows]}


class Net(nn.Module):
    features: int

    @nn.compact
    def __call__(self, images, train):
        x = images.astype(jnp.float32) / 128 - 1
        for factor in (1, 2, 4):
            x = nn.Conv(factor * self.features, (3, 3), use_bias=False)(x)
            # Each device normalizes by its share of the batch. Running statistics are
            # averaged over devices.
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def main(config):
    net = Net(config.features)

    def loss_fn(params, batch, *, model_state):
        logits, model_state = net.apply(
            {"params": params, **model_state},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        right = (logits.argmax(axis=1) == batch["label"]).mean()
        aux = pj.Aux(metrics={"accuracy": right}, model_state=model_state)
        return losses.mean(), aux

    @jax.jit
    def right_answers(params, model_state, batch):
        variables = {"params": params, **model_state}
        logits = net.apply(variables, batch["image"], train=False)
        return (logits.argmax(axis=1) == batch["label"]).sum()

    data, test = load("train", config.data), load("test", config.data)
    steps = config.epochs * (len(data["label"]) // config.batch)
    rate = optax.warmup_cosine_decay_schedule(0.0, config.rate, steps // 10, steps)
    tx = optax.chain(
        optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9, nesterov=True)
    )
    train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(), width=2)

    first = next(batches(data, config.batch, 0))
    variables = net.init(jax.random.key(0), first["image"][:1], train=False)
    state = train.init(
        variables["params"],
        model_state={"batch_stats": variables["batch_stats"]},
        batch=first,
    )
    begin, accuracy = 0, 0.0
    with checkpoint.manager(config.folder) as manager:
        if manager.latest_step() is not None:
            restored = checkpoint.restore(manager, train, state)
            state, begin = restored.state, restored.extras["epoch"]
        for epoch in range(begin, config.epochs):
            infos = []
            for batch in batches(data, config.batch, epoch):
                state, info = train.step(state, batch)
                infos.append(info)
            state, late = train.drain(state)  # applies the gradient in flight
            mean = pj.mean_info([*infos, *late])
            parts = range(0, len(test["label"]), 1_000)
            tested = [{k: x[n : n + 1_000] for k, x in test.items()} for n in parts]
            found = [right_answers(state.params, state.model_state, x) for x in tested]
            accuracy = float(sum(found)) / len(test["label"])
            print(f"epoch {epoch}: loss {mean.loss:.4f}, test accuracy {accuracy:.4f}")
            checkpoint.save(manager, state, {"epoch": epoch + 1})
    return accuracy


if __name__ == "__main__":
    main(tyro.cli(Config))

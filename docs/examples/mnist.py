"""Trains an MLP on MNIST, on all devices of this machine.

    python mnist.py --data ~/tensorflow_datasets/mnist/3.0.1

The folder is a version of MNIST that TensorFlow Datasets has prepared with
`file_format="array_record"`. Without a folder, the images are generated.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import pipejax as pj


@dataclasses.dataclass(frozen=True)
class Config:
    data: str = ""
    epochs: int = 5
    batch: int = 256  # examples of all devices together
    hidden: int = 512
    rate: float = 1e-3


def load(split, folder):
    """Returns images with values from 0 to 1, and their labels."""
    if not folder:  # ten random images, with noise
        rng = np.random.default_rng(split == "test")
        labels = rng.integers(10, size=2_000)
        clean = np.random.default_rng(2).uniform(size=(10, 28, 28))[labels]
        noisy = np.clip(clean + rng.normal(0, 0.5, clean.shape), 0, 1)
        return {"image": noisy.astype(np.float32), "label": labels}
    import tensorflow_datasets as tfds

    source = tfds.builder_from_directory(folder).as_data_source(split)
    examples = [source[index] for index in range(len(source))]
    images = np.stack([example["image"] for example in examples])[..., 0]
    labels = np.array([example["label"] for example in examples])
    return {"image": images.astype(np.float32) / 255, "label": labels}


def batches(data, size, epoch):
    """Yields the batches of an epoch, and drops the remainder."""
    order = np.random.default_rng(epoch).permutation(len(data["label"]))
    for end in range(size, len(order) + 1, size):
        yield {name: x[order[end - size : end]] for name, x in data.items()}


def init(hidden):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [28 * 28, hidden, hidden, 10]
    return [
        {"w": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for key, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def loss_fn(params, batch):
    x = batch["image"].reshape(len(batch["image"]), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    logits = x @ params[-1]["w"] + params[-1]["b"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = (logits.argmax(axis=1) == batch["label"]).mean()
    return losses.mean(), pj.Aux(metrics={"accuracy": right})


def main(config):
    data, test = load("train", config.data), load("test", config.data)
    train = pj.make_train_step(
        loss_fn, optax.adamw(config.rate), mesh=pj.data_mesh(), width=2
    )
    evaluate = jax.jit(loss_fn)
    first = next(batches(data, config.batch, 0))
    state = train.init(init(config.hidden), batch=first)
    accuracy = 0.0
    for epoch in range(config.epochs):
        infos = []
        for batch in batches(data, config.batch, epoch):
            state, info = train.step(state, batch)
            infos.append(info)
        state, late = train.drain(state)  # applies the gradient in flight
        mean = pj.mean_info([*infos, *late])
        test_loss, aux = evaluate(state.params, test)
        accuracy = float(aux.metrics["accuracy"])
        print(
            f"epoch {epoch}: loss {mean.loss:.4f}, accuracy"
            f" {mean.metrics['accuracy']:.4f}, test loss {test_loss:.4f}, test accuracy"
            f" {accuracy:.4f}"
        )
    return accuracy


if __name__ == "__main__":
    main(tyro.cli(Config))

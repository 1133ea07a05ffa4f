"""Makes train steps whose loss or optimizer has a collective of its own."""

import flax.linen as nn
import jax
import numpy as np
import optax
from jax import lax

import pipejax as pj

from ...helpers import batches, init_params, loss_fn

STEPS = 20


class Net(nn.Module):
    """A network with batch norm over the examples of all devices."""

    axis_name: str | None = "data"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(7)(x)
        norm = nn.BatchNorm(False, momentum=0.9, axis_name=self.axis_name)
        return nn.Dense(3)(norm(x))


def norm_loss(params, batch, *, model_state):
    variables = {"params": params, "batch_stats": model_state}
    out, after = Net().apply(variables, batch["x"], mutable=["batch_stats"])
    return ((out - batch["y"]) ** 2).mean(), pj.Aux(model_state=after["batch_stats"])


def centred_loss(params, batch):
    """Returns a loss with a mean over devices, as large as a bucket of gradients."""
    centre = lax.pmean(batch["x"].mean(0), "data")
    return loss_fn(params, batch | {"x": batch["x"] - centre[None]})


def inside_loss(params, batch):
    """Returns a loss that exchanges between the devices of one process."""
    mine = lax.psum(batch["x"].mean(0), "device")
    return loss_fn(params, batch | {"x": batch["x"] - 0.1 * mine[None]})


def averaging(decay=0.5):
    """Makes an optimizer that takes the mean over devices of updates that are equal."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda g: decay * lax.pmean(g, "data"), updates), state

    return optax.GradientTransformation(lambda params: (), update)


CASES = {
    "sync batch norm": (norm_loss, optax.sgd(0.1)),
    "scalar": (centred_loss, optax.sgd(0.1)),
    "optimizer": (loss_fn, optax.chain(averaging(), optax.sgd(0.1))),
    "inside": (inside_loss, optax.sgd(0.1)),
}


def make(name, mesh, width, executor="auto"):
    """Returns a train step and its first state."""
    loss, tx = CASES[name]
    axis_name = mesh.axis_names if len(mesh.axis_names) > 1 else "data"
    train = pj.make_train_step(
        loss, tx, mesh=mesh, width=width, axis_name=axis_name, executor=executor
    )
    if name != "sync batch norm":
        return train, train.init(init_params())
    # Without an axis, Flax does not look for one while it initializes.
    variables = Net(None).init(jax.random.key(0), np.zeros((2, 5), np.float32))
    return train, train.init(variables["params"], model_state=variables["batch_stats"])


def trained(train, state, steps=STEPS):
    """Returns the drained state. Each process passes its own part of every batch."""
    rank, processes = jax.process_index(), jax.process_count()
    for batch in batches(steps):
        mine = jax.tree.map(lambda x: np.split(x, processes)[rank], batch)
        state, _ = train.step(state, train.batch(mine))
    return train.drain(state)[0]

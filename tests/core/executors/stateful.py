"""
Trains a model with static objects and a model state, on one process or several.

The text of the static objects has addresses, which differ between processes.
"""

import jax
import numpy as np
import optax

import pipejax as pj

from ...helpers import batches, init_params, loss_fn


class Setting:
    """Compares by identity, and prints with its address."""


@jax.tree_util.register_pytree_node_class
class Model:
    """Parameters with a static function and a static object."""

    def __init__(self, params, static):
        self.params, self.static = params, static

    def tree_flatten(self):
        return (self.params,), self.static

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, static)


def loss(model, batch, *, model_state, rng):
    act, _ = model.static
    mean = batch["x"].mean()
    new = model_state | {
        "last": mean,
        "wave": 0.5 * model_state["wave"] + 1j * mean,
        "seen": model_state["seen"] + 1,
    }
    noise = sum(jax.random.normal(rng[name]) for name in ("dropout", "mixup"))
    return act(loss_fn(model.params, batch) * noise), pj.Aux(model_state=new)


def make(mesh, **settings):
    """Returns a train step and its first state."""
    train = pj.make_train_step(
        loss, optax.adam(0.01), mesh=mesh, width=2, weight_prediction=False, **settings
    )
    state = train.init(
        Model(init_params(), (lambda x: 2 * x, Setting())),
        model_state={
            "last": np.float32(0),
            "wave": np.complex64(1),
            "seen": np.int32(0),
            "table": np.full(3, np.inf, np.float32),
        },
        rng={"dropout": jax.random.key(0), "mixup": jax.random.PRNGKey(1)},
        batch=batches(1)[0],
    )
    return train, state

"""purejaxrl's PPO, whose training and environments are one program of scans."""

import operator
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "purejaxrl"
EPOCHS, MINIBATCHES, ENVIRONMENTS, LENGTH = 2, 2, 8, 16
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "_loss_fn takes `params, batch`",
        "it takes the parts of the batch",
        "the mean of the advantages is over all devices",
        "their standard deviation, too",
        "it returns the loss alone",
        "make_train_step",
        "train.init in place of TrainState.create",
        "train.step in place of apply_gradients, in the innermost scan",
        "train.drain after the scans",
    ),
    dropped=(
        "the parts of the loss, which the program does not return: as metrics, they"
        " need a batch before the scans",
    ),
    keys="one key for environments, actions and minibatches, as in the program",
)


# How the loops are told where to begin, and how they tell what a minibatch leads to.
RECORDED = {
    "network_params = network.init": "network_params = start",
    "return (train_state, total_loss)": (
        "return train_state, (train_state.params, total_loss[0])"
    ),
    "metric = traj_batch.info": "metric = loss_info",
}
CONVERTED = {
    "train_state = TrainState.create": "train_state = start",
    "grad_fn = ": "",
    "total_loss, grads = ": "train_state, info = step(train_state, batch_info)",
    "train_state = train_state.apply_gradients": "total_loss = [info]",
}
OVER_DEVICES = {
    "gae = ": """
gae = gae - jax.lax.pmean(gae.mean(), "data")
gae = gae / (jnp.sqrt(jax.lax.pmean((gae ** 2).mean(), "data")) + 1e-8)
"""
}


class Delayed(TrainState):
    """A state of the program that applies each gradient one step late."""

    waiting: Any = None

    @classmethod
    def create(cls, *, params: Any, **settings: Any) -> "Delayed":
        """Makes a state in which no gradient waits."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return super().create(params=params, waiting=zeros, **settings)

    def apply_gradients(self, *, grads: Any, **rest: Any) -> "Delayed":
        """Applies the gradient of the step before, except in the first step."""
        late = super().apply_gradients(grads=self.waiting, **rest)
        now = self.replace(step=self.step + 1)
        first = self.step == 0
        chosen = jax.tree.map(lambda a, b: jnp.where(first, a, b), now, late)
        return chosen.replace(waiting=grads)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, on eight environments of CartPole."""
    folder = sources / FOLDER / "purejaxrl"
    brax = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training")
    (ppo,) = load((folder,), ("ppo",), (*brax, "navix", "seaborn"))
    source = (folder / "ppo.py").read_text()
    config = {
        "ENV_NAME": "CartPole-v1",
        "NUM_ENVS": ENVIRONMENTS,
        "NUM_STEPS": LENGTH,
        "TOTAL_TIMESTEPS": ENVIRONMENTS * LENGTH * steps // (EPOCHS * MINIBATCHES),
        "NUM_UPDATES": steps // (EPOCHS * MINIBATCHES),
        "UPDATE_EPOCHS": EPOCHS,
        "NUM_MINIBATCHES": MINIBATCHES,
        "ACTIVATION": "tanh",
        "ANNEAL_LR": True,
        "LR": 2.5e-3,
        "MAX_GRAD_NORM": 0.5,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
    }
    network = ppo.ActorCritic(2, activation=config["ACTIVATION"])
    names = {**vars(ppo), "network": network, "config": config}
    schedule = function(source, "linear_schedule", names)
    clip = optax.clip_by_global_norm(config["MAX_GRAD_NORM"])
    tx = optax.chain(clip, optax.adam(schedule, eps=1e-5))

    def trained(start: Any, lines: dict[str, str], **more: Any) -> Any:
        """Runs the program's function, and returns its last state, and its steps."""

        @jax.jit
        def run(start: Any) -> Any:
            own = {**vars(ppo), "start": start, **more}
            make = function(source, "make_train", own, lines=lines)
            out = make(dict(config))(jax.random.PRNGKey(seed))
            return out["runner_state"][0], out["metrics"]

        state, found = run(start)
        flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[3:]), found)
        return state, [jax.tree.map(operator.itemgetter(i), flat) for i in range(steps)]

    def original(params: Any) -> History:
        _, found = trained(params, RECORDED)
        return History(*map(list, zip(*found, strict=True)))

    def delayed(params: Any) -> History:
        state, found = trained(params, RECORDED, TrainState=Delayed)
        history, losses = map(list, zip(*found, strict=True))
        last = state.apply_gradients(grads=state.waiting)
        return History([*history, last.params], losses)

    on_device = function(source, "_loss_fn", names, lines=OVER_DEVICES)

    def loss_fn(params: Any, batch: Any) -> Any:
        loss, _ = on_device(params, *batch)
        return loss

    def converted(params: Any, width: int) -> History:
        train = _loops.train_step(loss_fn, tx, width)
        lines = {**RECORDED, **CONVERTED}
        state, found = trained(train.init(params), lines, step=train.step)
        history, infos = map(list, zip(*found, strict=True))
        if width > 1:
            state, last = train.drain(state)
            history.append(state.params)
            infos += last
        return History(history, [info.loss for info in infos if info.arrived])

    start = network.init(jax.random.PRNGKey(seed), jnp.zeros(4))
    return Program(
        params=start,
        original=original,
        delayed=delayed,
        converted=converted,
    )

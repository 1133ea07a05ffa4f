"""jax-gans' DCGAN: two players, which both change the batch statistics of both."""

import functools
import pathlib
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from jax import lax

import pipejax as pj

from . import _loops
from ._program import Conversion, History, Program
from ._sources import load

FOLDER = "jax-gans"
PLAYERS = ("generator", "discriminator")
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "a function of loss_g or loss_d that returns a loss",
        "the loss takes `params, batch, *, model_state, shared`",
        "it calls the program's loss with the device's rows of images and keys",
        "it returns pj.Aux with the batch statistics",
        "the function returns it",
        "make_train_step for the generator",
        "make_train_step for the discriminator",
        "train.init for the generator",
        "train.init for the discriminator",
        "train.step of the generator, with the parameters of the discriminator",
        "the discriminator's state gets the batch statistics",
        "train.step of the discriminator, with the parameters of the generator",
        "the generator's state gets the batch statistics",
        "train.drain of the generator at the end",
        "train.drain of the discriminator at the end",
    ),
    around=(
        "the log gets the loss of the generator",
        "the log gets the loss of the discriminator",
        "samples with the parameters of the state",
        "samples with the batch statistics of the state",
    ),
    dropped=("batch statistics of the first device alone: they are averaged",),
    keys="noise: the program's key of each device",
)


class Optimizer(flax.struct.PyTreeNode):
    """`flax.optim.Adam` as it was, which the program is written for."""

    target: Any
    opt_state: Any
    tx: optax.GradientTransformation = flax.struct.field(pytree_node=False)

    def apply_gradient(self, gradients: Any) -> Any:
        updates, opt_state = self.tx.update(gradients, self.opt_state)
        target = optax.apply_updates(self.target, updates)
        return self.replace(target=target, opt_state=opt_state)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program as it is, on random images."""
    stubs = ("cv2", "wandb", "torch", "torchvision", "torchvision.transforms")
    tf = ("tensorflow", "tensorflow_datasets", "matplotlib", "matplotlib.pyplot")
    (gan,) = load((sources / FOLDER,), ("dcgan-mnist",), (*stubs, *tf))
    key_g, key_d, key = jax.random.split(jax.random.PRNGKey(seed), 3)
    made = [
        gan.Generator(training=True).init(key_g, jnp.ones((1, 1, 1, 100))),
        gan.Discriminator(training=True).init(key_d, jnp.ones((1, 32, 32, 1))),
    ]
    tx = optax.adam(1e-4, b1=0.5, b2=0.9)
    rng = np.random.default_rng(seed)
    shape = (steps, _loops.DEVICES, 2, 32, 32, 1)
    images = rng.uniform(-1, 1, shape).astype(np.float32)
    rngs = jax.random.split(key, _loops.DEVICES)
    begin = {
        "params": [each["params"] for each in made],
        "stats": [{"batch_stats": each["batch_stats"]} for each in made],
    }
    losses = (gan.loss_g, gan.loss_d)

    def original(start: Any) -> History:
        history = History([], [])
        stats = [jax_utils.replicate(x) for x in start["stats"]]
        players = [Optimizer(x, tx.init(x), tx) for x in start["params"]]
        players, keys = [jax_utils.replicate(x) for x in players], rngs
        for batch in images:
            out = gan.train_step(keys, *stats, *players, batch)
            keys, *rest = jax.block_until_ready(out)
            stats, players, (loss_d, loss_g) = rest[:2], rest[2:4], rest[4:]
            means = jax.tree.map(lambda x: np.asarray(x).mean(axis=0), stats)
            params = [_loops.first(player.target) for player in players]
            history.params.append({"params": params, "stats": means})
            history.reported.append(_loops.first((loss_g, loss_d)))
        return history

    @jax.jit
    def keys_of(keys: Any) -> Any:
        """Returns the keys of the devices for the next step, and for both players."""
        return tuple(
            jax.vmap(lambda key: jax.random.split(key, 3))(keys).swapaxes(0, 1)
        )

    def of_player(i: int) -> Any:
        @functools.partial(
            jax.pmap, axis_name="batch", in_axes=(None, None, 0, 0, None, 0)
        )
        def message(
            own: Any, other: Any, batch: Any, key: Any, stats: Any, changes: Any
        ) -> Any:
            """Returns loss and gradient, and the changes of this device's statistics.

            A device computes with its own changes that are still to come.
            """
            before = jax.tree.map(jnp.add, stats, changes)
            args = own, other, batch, key, *before
            out = jax.value_and_grad(losses[i], has_aux=True)(*args)
            (loss, after), gradients = out
            changes = jax.tree.map(jnp.subtract, list(after), before)
            return *lax.pmean((loss, gradients), "batch"), changes

        return message

    def delayed(start: Any) -> History:
        messages, stats, keys = [of_player(0), of_player(1)], start["stats"], rngs
        zeros = jax.tree.map(lambda x: jnp.zeros((_loops.DEVICES, *x.shape)), stats)
        params, waiting = list(start["params"]), [None, None]
        opt_states, changes = [tx.init(x) for x in params], [zeros, zeros]
        update, history = jax.jit(tx.update), History([], [])

        def arrive(i: int) -> None:
            nonlocal stats
            updates, opt_states[i] = update(waiting[i], opt_states[i])
            params[i] = optax.apply_updates(params[i], updates)
            means = jax.tree.map(lambda d: np.asarray(d).mean(axis=0), changes[i])
            stats = jax.tree.map(jnp.add, stats, means)

        for batch in images:
            keys, *own = keys_of(keys)
            reported = []
            for i in (0, 1):
                out = messages[i](
                    params[i], params[1 - i], batch, own[i], stats, changes[i]
                )
                loss, gradients, fresh = jax.block_until_ready(out)
                if waiting[i] is not None:
                    arrive(i)
                waiting[i], changes[i] = _loops.first(gradients), fresh
                reported.append(_loops.first(loss))
            history.params.append({"params": list(params), "stats": stats})
            history.reported.append(tuple(reported))
        arrive(0)
        arrive(1)
        history.params.append({"params": list(params), "stats": stats})
        return history

    def loss_of(i: int) -> Any:
        def loss_fn(params: Any, batch: Any, *, model_state: Any, shared: Any) -> Any:
            args = batch["image"][0], batch["key"][0], *model_state
            loss, after = losses[i](params, shared, *args)
            return loss, pj.Aux(model_state=list(after))

        return loss_fn

    def converted(start: Any, width: int) -> History:
        trains = [_loops.train_step(loss_of(i), tx, width) for i in (0, 1)]
        batch = {"image": images[0], "key": rngs}
        states = [
            trains[i].init(
                start["params"][i],
                model_state=start["stats"],
                batch=batch,
                shared=start["params"][1 - i],
            )
            for i in (0, 1)
        ]
        infos: list[list[Any]] = [[], []]
        history, keys = [], rngs

        def hand_on(i: int) -> None:
            states[1 - i] = states[1 - i]._replace(model_state=states[i].model_state)

        def keep() -> None:
            params = [state.params for state in states]
            history.append({"params": params, "stats": states[1].model_state})

        for each in images:
            keys, *own = keys_of(keys)
            for i in (0, 1):
                batch = {"image": each, "key": own[i]}
                shared = states[1 - i].params
                states[i], info = trains[i].step(states[i], batch, shared=shared)
                infos[i].append(info)
                hand_on(i)
            keep()
        if width > 1:
            for i in (0, 1):
                states[i], last = trains[i].drain(states[i])
                infos[i].extend(last)
                hand_on(i)
            keep()
        pairs = zip(*infos, strict=True)
        return History(
            history, [(g.loss, d.loss) for g, d in pairs if g.arrived and d.arrived]
        )

    return Program(
        params=begin,
        original=original,
        delayed=delayed,
        converted=converted,
    )

"""CleanRL's TD3: an actor and two critics, and targets that follow them slowly."""

import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pipejax as pj

from . import _loops
from ._program import Conversion, History, Program
from ._sources import function, load

FOLDER = "cleanrl"
SIZE = {"observations": 5, "actions": 2}
CONVERSION = Conversion(
    changed=(
        "import pipejax",
        "update_critic becomes a loss: `params, batch, *, shared`",
        "it takes its arrays from the batch",
        "it takes the noise from `rng`",
        "next actions by the actor's target in `shared`",
        "next values by the first critic's target in `shared`",
        "next values by the second critic's target in `shared`",
        "both losses of the program",
        "it returns their sum, and losses and values as metrics",
        "update_actor becomes a loss: `params, batch, *, shared`",
        "it returns the value by the first critic in `shared`",
        "make_train_step for the critics",
        "make_train_step for the actor",
        "train.init for the critics, with a batch",
        "train.init for the actor",
        "the targets at the start",
        "train.step of the critics, with the targets",
        "train.step of the actor, with the first critic",
        "the targets follow",
        "train.drain of the critics at the end",
        "train.drain of the actor at the end",
    ),
    around=(
        "losses and values of the log are those of the info",
        "the log gets the loss of the actor",
        "the first critic is saved from the state of both",
        "the second critic is saved from the state of both",
    ),
    keys="policy noise is off: one key draws the noise of the whole batch",
)


def program(sources: pathlib.Path, steps: int, seed: int) -> Program:
    """Makes the program, on random transitions and without noise of the policy."""
    path = sources / FOLDER / "cleanrl" / "td3_continuous_action_jax.py"
    stubs = ("gymnasium", "torch", "torch.utils", "torch.utils.tensorboard")
    own = ("cleanrl_utils", "cleanrl_utils.buffers")
    (td3,) = load((path.parent,), (path.stem,), (*stubs, *own))
    args = td3.Args(policy_noise=0.0)
    space = types.SimpleNamespace(low=-np.ones(2), high=np.ones(2))
    envs = types.SimpleNamespace(single_action_space=space)
    actor, qf = td3.Actor(2, jnp.ones(2), jnp.zeros(2)), td3.QNetwork()
    names = {**vars(td3), "args": args, "envs": envs, "actor": actor, "qf": qf}
    source = path.read_text()
    update_critic = jax.jit(function(source, "update_critic", names))
    update_actor = jax.jit(function(source, "update_actor", names))
    critic_cut = function(
        source, "update_critic", names, before="(qf1_loss_value", returns="mse_loss"
    )
    actor_cut = function(
        source,
        "update_actor",
        names,
        before="actor_loss_value",
        returns="actor_loss",
    )
    rng = np.random.default_rng(seed)
    batches = [_batch(rng) for _ in range(steps)]
    keys = jax.random.split(jax.random.PRNGKey(seed), 3)
    first = batches[0]
    begin = {
        "actor": actor.init(keys[0], first[0]),
        "qf1": qf.init(keys[1], first[0], first[1]),
        "qf2": qf.init(keys[2], first[0], first[1]),
    }
    tx, unused = optax.adam(args.learning_rate), keys[0]

    def state_of(name: Any, params: Any, target: Any = None) -> Any:
        model = actor if name == "actor" else qf
        return td3.TrainState.create(
            apply_fn=model.apply, params=params, target_params=target, tx=tx
        )

    def critic_losses(critics: Any, targets: Any, batch: Any) -> Any:
        """Returns both losses, each with its mean value, by the program's function."""
        states = [state_of(x, targets[x], targets[x]) for x in ("actor", "qf1", "qf2")]
        mse_loss = critic_cut(*states, *batch, unused)
        return {name: mse_loss(critics[name]) for name in ("qf1", "qf2")}

    def actor_loss(params: Any, critic: Any, batch: Any) -> Any:
        return actor_cut(None, state_of("qf1", critic), None, batch[0])(params)

    def followed(targets: Any, params: Any) -> Any:
        return jax.tree.map(
            lambda new, old: optax.incremental_update(new, old, args.tau),
            params,
            targets,
        )

    def original(params: Any) -> History:
        states = {x: state_of(x, params[x], begin[x]) for x in params}
        history = History([], [])
        for i, batch in enumerate(batches):
            qs, losses, values, _ = update_critic(*states.values(), *batch, unused)
            states = {"actor": states["actor"], "qf1": qs[0], "qf2": qs[1]}
            history.reported.append((losses, values))
            if i % args.policy_frequency == 0:
                one, qs, _ = update_actor(*states.values(), batch[0])
                states = {"actor": one, "qf1": qs[0], "qf2": qs[1]}
            history.params.append({x: states[x].params for x in states})
        return history

    critic_gradient = jax.jit(
        lambda critics, targets, batch: jax.grad(
            lambda critics: sum(
                loss for loss, _ in critic_losses(critics, targets, batch).values()
            )
        )(critics)
    )
    actor_gradient = jax.jit(jax.grad(actor_loss))

    def delayed(params: Any) -> History:
        targets, history = begin, History([], [])
        critics = _Late(tx, {"qf1": params["qf1"], "qf2": params["qf2"]})
        policy = _Late(tx, params["actor"])
        for i, batch in enumerate(batches):
            found = critic_losses(critics.params, targets, batch)
            (loss1, value1), (loss2, value2) = found.values()
            history.reported.append(((loss1, loss2), (value1, value2)))
            critics.add(critic_gradient(critics.params, targets, batch))
            if i % args.policy_frequency == 0:
                policy.add(actor_gradient(policy.params, critics.params["qf1"], batch))
                targets = followed(targets, {"actor": policy.params, **critics.params})
            history.params.append({"actor": policy.params, **critics.params})
        critics.add(None)
        policy.add(None)
        history.params.append({"actor": policy.params, **critics.params})
        return history

    def critic_loss_fn(params: Any, batch: Any, *, shared: Any) -> Any:
        found = critic_losses(params, shared, batch)
        (loss1, value1), (loss2, value2) = found.values()
        metrics = ((loss1, loss2), (value1, value2))
        return loss1 + loss2, pj.Aux(metrics=metrics)

    def actor_loss_fn(params: Any, batch: Any, *, shared: Any) -> Any:
        return actor_loss(params, shared, batch)

    def converted(params: Any, width: int) -> History:
        critics = _loops.train_step(critic_loss_fn, tx, width)
        policy = _loops.train_step(actor_loss_fn, tx, width)
        targets, history, infos = begin, [], []
        state = critics.init(
            {"qf1": params["qf1"], "qf2": params["qf2"]},
            batch=first,
            shared=targets,
        )
        own = policy.init(params["actor"])
        for i, batch in enumerate(batches):
            state, info = critics.step(state, batch, shared=targets)
            infos.append(info)
            if i % args.policy_frequency == 0:
                own, _ = policy.step(own, batch, shared=state.params["qf1"])
                targets = followed(targets, {"actor": own.params, **state.params})
            history.append({"actor": own.params, **state.params})
        if width > 1:
            (state, last), (own, _) = critics.drain(state), policy.drain(own)
            history.append({"actor": own.params, **state.params})
            infos += last
        return History(history, [info.metrics for info in infos if info.arrived])

    return Program(
        params=begin,
        original=original,
        delayed=delayed,
        converted=converted,
    )


def _batch(rng: np.random.Generator) -> Any:
    """Returns random observations, actions, next observations, rewards and ends."""
    normal = rng.normal(size=(4, 32, 5)).astype(np.float32)
    actions = rng.uniform(-1, 1, (32, 2)).astype(np.float32)
    ends = (rng.random(32) < 0.1).astype(np.float32)
    return normal[0], actions, normal[1], normal[2, :, 0], ends


class _Late:
    """Parameters that get each of their gradients one step late."""

    def __init__(self, tx: Any, params: Any) -> None:
        self.params, self.opt_state, self.waiting = params, tx.init(params), None
        self.update = jax.jit(tx.update)

    def add(self, gradients: Any) -> None:
        if self.waiting is not None:
            updates, self.opt_state = self.update(self.waiting, self.opt_state)
            self.params = optax.apply_updates(self.params, updates)
        self.waiting = gradients

"""TD3 on a pendulum: two critics, target networks, and a delayed policy.

The step of the critics gets the target networks as its shared input, and the step of
the policy gets a critic. The policy is trained in every second step. The target
networks then follow by Polyak averaging, between the steps.

Reference:
  Fujimoto et al., Addressing Function Approximation Error in Actor-Critic Methods,
  ICML 2018, https://arxiv.org/abs/1802.09477
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import _mlp
from ._client import Client, Extra, Program, Trainer

STEPS, BATCH = 8, 32
DISCOUNT, POLYAK, POLICY_DELAY = 0.98, 0.05, 2
NOISE, NOISE_CLIP = 0.2, 0.5
# The longest sums are over the examples of a batch.
TERMS = BATCH

_average = jax.jit(optax.incremental_update)


def td3(seed: int) -> Program:
    """Makes the program that trains two critics and a policy with Adam."""
    rng = np.random.default_rng(seed)
    critics = {"q1": _mlp.init(rng, 4, 1), "q2": _mlp.init(rng, 4, 1)}
    policy, batches = _mlp.init(rng, 3, 1), _replayed(rng)

    def loop(critic: Trainer, actor: Trainer) -> None:
        targets = {"critics": critic.params, "policy": actor.params}
        for step, batch in enumerate(batches):
            critic.step(batch, shared=targets)
            if step % POLICY_DELAY == POLICY_DELAY - 1:
                actor.step(batch["observation"], shared=critic.params["q1"])
                online = {"critics": critic.params, "policy": actor.params}
                targets = _average(online, targets, POLYAK)

    critic = Client(
        loss=_critic_loss,
        tx=optax.adam(0.003),
        params=critics,
        rng=jax.random.key(seed),
        shared={"critics": critics, "policy": policy},
        batches=batches,
        terms=TERMS,
    )
    actor = Client(
        loss=_policy_loss,
        whole=_policy_loss,
        tx=optax.adam(0.003),
        params=policy,
        shared=critics["q1"],
        batches=[batch["observation"] for batch in batches],
        terms=TERMS,
    )
    return Program((critic, actor), loop)


def _critic_loss(
    params: Any, batch: Any, *, shared: Any, rng: jax.Array
) -> tuple[jax.Array, Extra]:
    """Every device smooths the policy of the target with noise of its own."""
    noise = NOISE * jax.random.normal(rng, batch["action"].shape)
    noise = jnp.clip(noise, -NOISE_CLIP, NOISE_CLIP)
    after = batch["next_observation"]
    action = jnp.clip(_action(shared["policy"], after) + noise, -1, 1)
    values = [_value(q, after, action) for q in shared["critics"].values()]
    target = batch["reward"] + DISCOUNT * jnp.minimum(*values)
    online = [_value(q, batch["observation"], batch["action"]) for q in params.values()]
    loss = sum(jnp.mean((value - target) ** 2) for value in online)
    return jnp.asarray(loss), Extra({"target": target.mean()})


def _policy_loss(
    params: Any, observations: Any, *, shared: Any
) -> tuple[jax.Array, Extra]:
    return -_value(shared, observations, _action(params, observations)).mean(), Extra()


def _action(policy: Any, observations: jax.Array) -> jax.Array:
    return jnp.tanh(_mlp.apply(policy, observations))


def _value(critic: Any, observations: jax.Array, actions: jax.Array) -> jax.Array:
    return _mlp.apply(critic, jnp.concatenate([observations, actions], axis=-1))


def _replayed(rng: np.random.Generator) -> list[Any]:
    """Returns batches from a replay buffer that random actions have filled."""
    buffer, state = [], np.array([np.pi, 0.0])
    for action in rng.uniform(-1, 1, size=500):
        after, reward = _pendulum(state, action)
        buffer.append((_observed(state), [action], [reward], _observed(after)))
        state = after
    names = ("observation", "action", "reward", "next_observation")
    columns = [np.array(x, np.float32) for x in zip(*buffer, strict=True)]
    rows = rng.integers(len(buffer), size=(STEPS, BATCH))
    return [dict(zip(names, [x[i] for x in columns], strict=True)) for i in rows]


def _pendulum(state: np.ndarray, action: float) -> tuple[np.ndarray, float]:
    """Moves a pendulum with the angle 0 at the top by a twentieth of a second."""
    angle, speed = state
    speed += 0.05 * (10 * np.sin(angle) + 4 * action)
    angle += 0.05 * speed
    return np.array([angle, speed]), np.cos(angle) - 0.01 * speed**2


def _observed(state: np.ndarray) -> list[float]:
    angle, speed = state
    return [np.cos(angle), np.sin(angle), speed / 8]

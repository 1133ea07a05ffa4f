"""The parts of the hand-written loops: gradients, their mean, and an update."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._client import Client, Loss

DEVICES = 4


class State(NamedTuple):
    """The values that an update changes.

    Attributes:
      params: The parameters.
      opt_state: The state of the optimizer.
      model_state: The state of the model, whose leaves are all floating-point.
    """

    params: Any
    opt_state: Any
    model_state: Any


class Inputs(NamedTuple):
    """The inputs of a step.

    Attributes:
      batch: The global batch.
      shared: The input that all devices share, or `None` if the client has none.
      rng: The key of the step, or `None` if the client has none.
    """

    batch: Any
    shared: Any
    rng: Any


class Message(NamedTuple):
    """A gradient and its passengers: of one device, of all devices, or their mean.

    Attributes:
      gradient: A pytree like the parameters.
      reported: The loss and the metrics.
      change: The change of the model state.
      weight: A scalar, the weight of the message in the mean; `None` if all messages
        have the same weight.
    """

    gradient: Any
    reported: tuple[jax.Array, Any]
    change: Any
    weight: jax.Array | None


class Pieces(NamedTuple):
    """The functions that loops call. A value of all devices has a leading axis.

    Attributes:
      whole: `(state, inputs) -> message`, the mean over the global batch; `None` if
        the shares of the devices matter.
      own: `(states of all devices, inputs) -> messages of all devices`.
      mean: `messages of all devices -> message`.
      update: `(state, message) -> state`.
    """

    whole: Callable[..., Any] | None
    own: Callable[..., Any]
    mean: Callable[..., Any]
    update: Callable[..., Any]


def pieces_of(client: Client) -> Pieces:
    """Returns the functions that the loops of a client call, compiled."""

    def update(state: State, message: Message) -> State:
        value = {"value": message.reported[0]} if client.takes_value else {}
        updates, opt_state = client.tx.update(
            message.gradient, state.opt_state, state.params, **value
        )
        params = optax.apply_updates(state.params, updates)
        new = moved(State(params, opt_state, state.model_state), message.change)
        if message.weight is None:
            return new
        real = message.weight > 0
        return jax.tree.map(lambda n, o: jnp.where(real, n, o), new, state)

    return Pieces(
        whole=_whole(client.whole) if client.whole else None,
        own=_own(client.loss, client.microbatches),
        mean=jax.jit(_mean),
        update=jax.jit(update),
    )


@functools.cache
def _own(loss: Loss, microbatches: int) -> Callable[..., Any]:
    """Returns the function that computes the messages of all devices.

    Each device takes its own share. Collectives in the loss run between these devices.
    """

    def one(state: State, own: Inputs) -> Message:
        return _accumulated(loss, state, own, microbatches)

    def own(states: State, inputs: Inputs) -> Message:
        shares = jax.tree.map(
            lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), inputs.batch
        )
        keys = None
        if inputs.rng is not None:
            # Like pipejax: fold the number of the device into the key of the step.
            fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
            keys = fold_in(inputs.rng, jnp.arange(DEVICES))
        own = Inputs(shares, inputs.shared, keys)
        axes = Inputs(batch=0, shared=None, rng=0)
        return jax.vmap(one, in_axes=(0, axes), axis_name="data")(states, own)

    return jax.jit(own)


@functools.cache
def _whole(loss: Loss) -> Callable[..., Any]:
    def whole(state: State, inputs: Inputs) -> Message:
        return _message(loss, state, inputs)

    return jax.jit(whole)


def stacked(states: Sequence[State]) -> State:
    """Returns the states of all devices along a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def part(messages: Any, device: int) -> Any:
    """Returns the message of one device, or its part of a message."""
    return jax.tree.map(lambda x: x[device], messages)


def moved(state: State, change: Any) -> State:
    """Returns the state after a change of the model state."""
    return state._replace(model_state=jax.tree.map(jnp.add, state.model_state, change))


def _mean(messages: Message) -> Message:
    """Returns the mean of messages, weighted if they have weights."""
    weights = messages.weight
    if weights is None:
        return jax.tree.map(lambda x: x.mean(axis=0), messages)
    total = weights.sum()

    def weighted(x: jax.Array) -> jax.Array:
        w = weights.reshape(-1, *[1] * (x.ndim - 1))
        # A message of weight 0 may be NaN.
        return jnp.where(w > 0, w * x, 0).sum(axis=0) / total

    return Message(
        gradient=jax.tree.map(weighted, messages.gradient),
        reported=jax.tree.map(weighted, messages.reported),
        change=jax.tree.map(lambda x: x.mean(axis=0), messages.change),
        weight=total,
    )


def _accumulated(loss: Loss, state: State, inputs: Inputs, parts: int) -> Message:
    """Returns the message of a share that is taken in parts, one after the other."""
    if parts == 1:
        return _message(loss, state, inputs)
    key = inputs.rng
    keys = [None] * parts if key is None else jax.random.split(key, parts)
    each, now = [], state
    for i in range(parts):
        batch = jax.tree.map(lambda x, i=i: jnp.split(x, parts)[i], inputs.batch)
        each.append(_message(loss, now, Inputs(batch, inputs.shared, keys[i])))
        now = moved(now, each[-1].change)
    together = _mean(jax.tree.map(lambda *x: jnp.stack(x), *each))
    change = jax.tree.map(jnp.subtract, now.model_state, state.model_state)
    return together._replace(change=change)


def _message(loss: Loss, state: State, inputs: Inputs) -> Message:
    given = {
        "model_state": state.model_state,
        "rng": inputs.rng,
        "shared": inputs.shared,
    }
    given = {name: value for name, value in given.items() if value is not None}
    grad = jax.value_and_grad(loss, has_aux=True)
    (value, extra), gradient = grad(state.params, inputs.batch, **given)
    change = jax.tree.map(jnp.subtract, extra.model_state, state.model_state)
    return Message(gradient, (value, extra.metrics), change, extra.weight)

r"""Moves a train state from p devices to another number of devices, p'.

Parameters and optimizer state are replicated and stay as they are. Each new device gets
the mean over the old devices of messages in flight, so that the mean over the new
devices is the same. During the conversion, every new device holds the messages of all
old devices.

If p stays, and only hosts average other devices, those of a new host get the mean of
their own messages.

If the loss function returns weights W, the mean gradient is `sum(W g) / sum(W)`, and
the sum of a batch's weights does not depend on the number of devices. The new devices
then get equal shares of the sum of gradients, loss and metrics over the old devices.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pipejax._core.executors import StepConfig, in_flight_shardings
from pipejax._core.message import InFlight, Message
from pipejax.train_step import PipelineState, TrainStep

from ._spread import Spread


def shapes_on(train: TrainStep, like: PipelineState, where: Spread) -> PipelineState:
    """Returns the shapes that a state of `train` has on other devices or groups."""

    def resized(leaf: Any, now: int, then: int) -> jax.ShapeDtypeStruct:
        size = leaf.shape[0] // now * then
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    def of_all(leaf: Any) -> jax.ShapeDtypeStruct:
        return resized(leaf, train.config.messages, where.messages)

    in_flight: Any = like.in_flight
    in_flight = in_flight._replace(
        pending=jax.tree.map(of_all, like.in_flight.pending),
        filled=resized(like.in_flight.filled, train.config.devices, where.devices),
    )
    return like._replace(in_flight=in_flight)


def reshard(train: TrainStep, state: PipelineState, before: Spread) -> PipelineState:
    """Moves a state whose devices hold the messages of all devices `before`."""
    states = state.in_flight.codec_states
    in_flight = state.in_flight._replace(codec_states={})
    own = in_flight_shardings(in_flight, train.config)

    def spread(in_flight: InFlight) -> InFlight:
        return _shared_out(in_flight, before, train.config)

    in_flight = jax.jit(spread, out_shardings=own)(in_flight)
    return state._replace(in_flight=in_flight._replace(codec_states=states))


def _shared_out(in_flight: InFlight, before: Spread, now: StepConfig) -> InFlight:
    # The devices of a host may hold the same message, which then counts for all.
    copies = before.devices // before.messages

    def rows(leaf: jax.Array) -> jax.Array:
        count = before.messages
        return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])

    def mean(leaf: jax.Array) -> jax.Array:
        one = rows(leaf).mean(axis=0).astype(leaf.dtype)
        return jnp.concatenate([one] * now.messages)

    def share(leaf: jax.Array) -> jax.Array:
        total = rows(leaf).sum(axis=0) * copies
        one = (total / now.devices).astype(leaf.dtype)
        return jnp.concatenate([one] * now.messages)

    def by_host(leaf: jax.Array) -> jax.Array:
        of_devices = jnp.repeat(rows(leaf), copies, axis=0)
        shape = now.messages, now.devices // now.messages, *of_devices.shape[1:]
        one = of_devices.reshape(shape).mean(axis=1).astype(leaf.dtype)
        return jnp.concatenate(one)

    def shared_out(message: Message) -> Message:
        if before.devices == now.devices:
            return jax.tree.map(by_host, message)
        by = mean if message.weight is None else share
        return message._replace(
            gradients=jax.tree.map(by, message.gradients),
            changes=jax.tree.map(mean, message.changes),
            passengers=jax.tree.map(by, message.passengers),
        )

    return in_flight._replace(
        pending=tuple(map(shared_out, in_flight.pending)),
        # This is the same on all devices. A mean is not used, because rounding could
        # make an integer one too small.
        filled=jnp.repeat(in_flight.filled[:1], now.devices),
    )

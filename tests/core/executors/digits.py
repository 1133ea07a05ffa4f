"""
Provides work for executors whose result shows every message and their order.

Device i of p sends i, and device 0 sends what the sum needs to become a digit. An
update appends the sum to a number: after the messages 1, 2 and 3 the number is 123, at
every width. The number shows a message that is lost, applied twice or out of order, and
a device that is left out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.executors import StepConfig
from pipejax._core.message import Message, averaging, empty
from pipejax.collectives import psum

DEVICES = 2


class State(NamedTuple):
    """The digits applied so far, as one number, and the number of steps so far."""

    number: jax.Array
    step: jax.Array

    @property
    def learned(self):
        """The exchange updates nothing."""

    def over_data(self, axis_name):
        del axis_name
        return P()

    def with_learned(self, learned):
        assert learned is None
        return self

    def without_learned(self):
        return self


class Appending:
    """
    Sends a device's part of a digit, and appends the reduced digit to the number.

    Args:
      own: "compute" or "update" gets a collective of its own. It takes the mean over
        devices, which changes no sum.
    """

    def __init__(self, own=None):
        self.own = own
        self.traced = []

    def compute(self, state, in_flight, batch):
        del in_flight
        self.traced.append("compute")
        part = lax.pmean(batch, "data") if self.own == "compute" else batch
        return Message({"digit": part}), state.step + 1

    def exchange(self, state, message, arrived, behind, all_reduce):
        del state, behind
        return averaging(message, arrived, all_reduce, "data")

    def update(self, state, kept, reduced):
        self.traced.append("update")
        digit = reduced.sum.gradients["digit"]
        digit = lax.pmean(digit, "data") if self.own == "update" else digit
        number = jnp.where(reduced.arrived, 10 * state.number + digit, state.number)
        return State(number, state.step if kept is None else kept), reduced.arrived

    def deviation(self, in_flight, reduced):
        del in_flight, reduced


def config_of(work, *, width=2, devices=DEVICES, donate=False):
    """Returns the configuration of an executor that runs `work`."""
    mesh = pj.data_mesh(devices)
    return StepConfig(work, mesh, "data", width, psum(), donate)


def start(config):
    """Returns the state before the first step, and an empty queue."""
    like = Message({"digit": jax.ShapeDtypeStruct((1,), jnp.float32)})
    make = config.on_mesh(lambda: empty(like, config.width, {}), (), P("data"))
    state = State(jnp.zeros(1), jnp.int32(0))
    return jax.device_put(state, NamedSharding(config.mesh, P())), jax.jit(make)()


def batch_of(digit, devices=DEVICES):
    """Returns the parts of a digit, one for each device."""
    parts = np.arange(devices, dtype=np.float32)
    parts[0] = digit - parts.sum()
    return parts


def number_of(state):
    return int(state.number[0])


def written(executor, config, digits, *, drained=True):
    """Returns the number after a step for each digit, and after a drain at the end."""
    state, queue = start(config)
    numbers = []
    for digit in digits:
        state, queue, _ = executor.step(state, queue, batch_of(digit))
        numbers.append(number_of(state))
    if drained:
        state, _, _ = executor.drain(state, queue)
        numbers.append(number_of(state))
    return numbers

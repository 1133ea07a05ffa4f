"""
Provides work for executors whose result shows every message and their order.

Device i of p sends i, and device 0 sends what the sum needs to become a digit. An
update appends the sum to a number: after the messages 1, 2 and 3 the number is 123, at
every width. The number shows a message that is lost, applied twice or out of order, and
a device that is left out.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._core.executors import StepConfig
from pipejax._core.message import Message, averaging, empty
from pipejax._core.step import (
    Computed,
    Inputs,
    PipelineState,
    Settings,
    Step,
    Trainable,
)
from pipejax.collectives import psum

DEVICES = 2


class Appending:
    """
    Sends a device's part of a digit, and appends the reduced digit to the number.

    The number is the only parameter of a state.

    Args:
      own: "compute" or "apply" gets a collective of its own. It takes the mean over
        devices, which changes no sum.
    """

    def __init__(self, own=None):
        self.own = own
        self.traced = []

    @property
    def step(self):
        """Returns the step as the executors take it."""
        nothing = dict.fromkeys(("layout", "init", "message", "gather"))
        return Step(
            settings=Settings(None, None, "data"),
            compute=self.compute,
            exchange=self.exchange,
            apply=self.apply,
            **nothing,
        )

    def compute(self, state, in_flight, inputs):
        del in_flight
        self.traced.append("compute")
        part = inputs.batch
        part = lax.pmean(part, "data") if self.own == "compute" else part
        return Message({"digit": part}), Computed(None, None, state.step + 1)

    def exchange(self, trainable, message, valid, all_reduce):
        del trainable
        return averaging(message, valid.message, all_reduce, "data")

    def apply(self, state, computed, reduced, at_once):
        del at_once
        self.traced.append("apply")
        digit = reduced.sum.gradients["digit"]
        digit = lax.pmean(digit, "data") if self.own == "apply" else digit
        before = state.trainable.params
        number = jnp.where(reduced.valid, 10 * before + digit, before)
        state = state._replace(trainable=Trainable(number, ()))
        step = state.step if computed is None else computed.step
        return state._replace(step=step), reduced.valid


def config_of(work, *, width=2, devices=DEVICES, donate=False):
    """Returns the configuration of an executor that runs `work`."""
    return StepConfig(work.step, pj.data_mesh(devices), width, psum(), donate)


def start(config):
    """Returns the state before the first step, with an empty queue."""
    like = Message({"digit": jax.ShapeDtypeStruct((1,), jnp.float32)})
    make = config.on_mesh(lambda: empty(like, config.width, {}), (), P("data"))
    zero = jnp.int32(0)
    state = PipelineState(
        Trainable(jnp.zeros(1), ()), None, None, None, zero, zero, None
    )
    state = jax.device_put(state, NamedSharding(config.mesh, P()))
    return state._replace(in_flight=jax.jit(make)())


def batch_of(digit, devices=DEVICES):
    """Returns the parts of a digit, one for each device."""
    parts = np.arange(devices, dtype=np.float32)
    parts[0] = digit - parts.sum()
    return Inputs(parts)


def number_of(state):
    return int(state.params[0])


def written(executor, config, digits, *, drained=True):
    """Returns the number after a step for each digit, and after a drain at the end."""
    state = start(config)
    numbers = []
    for digit in digits:
        state, *_ = executor.step(state, batch_of(digit))
        numbers.append(number_of(state))
    if drained:
        state, *_ = executor.drain(state)
        numbers.append(number_of(state))
    return numbers

"""Collective-permutes: some devices send a payload to one other device each."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax._internal.wire import Transfer

from ._stages import Sent, Stages

Pairs = Sequence[tuple[int, int]]  # ranks of sender and receiver


def among(axis_name: AxisName, ranks: Iterable[int]) -> jax.Array:
    """Returns whether the rank of this device is in `ranks`, as a bool scalar."""
    return (lax.axis_index(axis_name) == jnp.array([*ranks], jnp.int32)).any()


def permute(axis_name: AxisName, pairs: Pairs, size: int) -> Sent:
    """Returns a collective that sends a payload of `size` bytes along `pairs`.

    The value is `(beside, payload)`. Each device keeps its `beside`. A device that
    receives no payload gets zeros.
    """

    def send(value: Any) -> Any:
        beside, payload = value
        return beside, lax.ppermute(payload, axis_name, pairs)

    return Sent(send, (Transfer("collective-permute", axis_size(axis_name), size),))


def hand_over(axis_name: AxisName, pairs: Pairs, size: int) -> Stages:
    """Returns a stage that sends a payload of `size` bytes along `pairs`.

    Unlike in `permute`, a device that receives no payload keeps its own.
    """

    def send(payload: jax.Array) -> jax.Array:
        came = lax.ppermute(payload, axis_name, pairs)
        return jnp.where(among(axis_name, (to for _, to in pairs)), came, payload)

    transfer = Transfer("collective-permute", axis_size(axis_name), size)
    return Stages((Sent(send, (transfer,)),))

"""Permutes: some devices send, each to one other."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pipejax.mesh import AxisName, Rows, axis_size

from ._stages import Sent, Stages
from ._wire import Transfer

Pairs = Sequence[tuple[int, int]]  # from, to


def among(axis_name: AxisName, ranks: Iterable[int]) -> jax.Array:
    """Whether this device is one of them, a bool scalar."""
    return (lax.axis_index(axis_name) == jnp.array([*ranks], jnp.int32)).any()


def permute(axis_name: AxisName, pairs: Pairs, size: int) -> Sent:
    """Of a value `(beside, payload)` the payload: each has what it was sent, or zeros.

    Args:
      axis_name: of those that exchange.
      pairs: who sends to whom.
      size: of a payload, bytes.
    """

    def send(value: Any) -> Any:
        beside, payload = value
        return beside, _sent(payload, axis_name, pairs)

    return Sent(send, (Transfer("collective-permute", axis_size(axis_name), size),))


def hand_over(axis_name: AxisName, pairs: Pairs, size: int) -> Stages:
    """A payload to those it is for; who is sent nothing keeps its own."""

    def send(payload: jax.Array) -> jax.Array:
        came = _sent(payload, axis_name, pairs)
        return jnp.where(among(axis_name, (to for _, to in pairs)), came, payload)

    transfer = Transfer("collective-permute", axis_size(axis_name), size)
    return Stages((Sent(send, (transfer,)),))


def _sent(payload: jax.Array, axis_name: AxisName, pairs: Pairs) -> jax.Array:
    if not isinstance(axis_name, Rows):
        return lax.ppermute(payload, axis_name, pairs)
    # There `lax.ppermute` wants everybody to send.
    sources = np.zeros(axis_size(axis_name), np.int32)
    for source, to in pairs:
        sources[to] = source
    mine = jnp.asarray(sources)[lax.axis_index(axis_name)]
    came = lax.all_gather(payload, axis_name)[mine]
    return jnp.where(among(axis_name, (to for _, to in pairs)), came, 0)

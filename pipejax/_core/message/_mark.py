"""Compares the calls of several processes by a mark, a number that travels along.

If a process takes another number of steps before a drain, or has a batch of other
shapes, devices add up gradients of different calls, and the sum does not show it. Each
device therefore sends a mark of its call. On p devices, all marks are the same if their
sum is p times the mark of every device.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax._internal.mesh import AxisName, axis_size
from pipejax._internal.types import Tree

from ._exchange import Exchange
from ._message import Message, Passengers
from ._reduce import Reduced

Mark = jax.Array | np.uint32 | None
"""The mark of the call that a device makes; `None` if calls are not compared."""


def mark_of(batch: Tree) -> np.uint32:
    """Returns the mark of a call, which depends on shapes and dtypes of its batch.

    In a drain, and for a message that was in flight before the call, the batch is
    `None`.
    """
    return _mark(tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(batch)))


@functools.cache
def _mark(form: Any) -> np.uint32:
    return np.uint32(zlib.crc32(repr(form).encode()))


def marked(
    exchange_of: Callable[[Message], Exchange],
    message: Message,
    mark: Mark,
    axis_name: AxisName,
) -> Exchange:
    """Returns an exchange that also says whether all devices have the same mark.

    Args:
      exchange_of: Function from a message to its exchange.
      message: The message of this device.
      mark: uint32 scalar, the mark of this device. With `None`, nothing is compared.
      axis_name: The axes along which messages are summed.
    """
    if mark is None:
        return exchange_of(message)
    devices = axis_size(axis_name)
    # Sums of whole numbers are exact in float32 up to 2**24.
    most = np.uint32(max(1, 2**24 // devices))
    own = (jnp.asarray(mark) % most).astype(jnp.float32)
    passengers = message.passengers or Passengers(jnp.zeros(0), False, _NOTHING)
    values = jnp.append(passengers.values, own)
    exchange = exchange_of(
        message._replace(passengers=dataclasses.replace(passengers, values=values))
    )

    def end(value: Any) -> Reduced:
        reduced = exchange.end(value)
        sums = reduced.sum.passengers.values
        alike = jnp.abs(sums[-1:] - devices * own) < 1 / 2
        rest = message.passengers and dataclasses.replace(passengers, values=sums[:-1])
        return reduced._replace(sum=reduced.sum._replace(passengers=rest), alike=alike)

    return exchange._replace(end=end)


def check_alike(alike: jax.Array | None) -> None:
    """Raises a `ValueError` if the marks of devices differ; waits for them."""
    if alike is None or jax.device_get(alike.addressable_data(0)).all():
        return
    raise ValueError(
        "`train.step` and `train.drain` must be called in the same order on every"
        " process, with a `batch` of the same shapes; got another call or another batch"
        " on another process, so gradients were added up that do not belong together."
        " Give `train.batch` as many examples on every process, take as many steps"
        " before a drain (`train.fewest_batches`), and go on from the last checkpoint."
    )


_NOTHING = jax.tree.structure(None)

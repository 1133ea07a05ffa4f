"""Lets all devices agree whether a sum will be usable, before they sum."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax._internal.ravel import working_dtype
from pipejax._internal.types import CodecStates
from pipejax.collectives import Local, Stages, Summands

from ._message import Message
from ._reduce import is_finite


class Agreed(NamedTuple):
    """Facts about a sum on which all devices agree before they sum.

    Attributes:
      usable: bool scalar, whether the sum will be usable, unless a sum of finite
        numbers overflows.
      mean_weight: Mean weight of a device; 1 without weights, or if their sum is 0.
    """

    usable: jax.Array
    mean_weight: jax.Array


Agreement = Callable[[], Agreed]
"""Returns what devices agree on. Its first call exchanges it."""


def agreement(message: Message, valid: jax.Array, axis_name: AxisName) -> Agreement:
    """Returns the function by which all devices agree on the sum of their messages."""
    return functools.cache(functools.partial(_agreed, message, valid, axis_name))


def agreed_bytes(devices: int, *, weighted: bool) -> int:
    """Returns the bytes of the collective by which devices agree."""
    return 4 * (1 + weighted * devices)


def _agreed(message: Message, valid: jax.Array, axis_name: AxisName) -> Agreed:
    weight = message.weight
    bad = (~is_finite(message)).astype(jnp.float32)[None]
    # XLA would merge a sum with sums of the compute, and not a maximum.
    if weight is None:
        (bad,) = lax.pmax(bad, axis_name)
        return Agreed(valid & (bad == 0), jnp.float32(1))
    devices = axis_size(axis_name)
    mine = jnp.arange(devices, dtype=jnp.int32) == lax.axis_index(axis_name)
    places = jnp.where(mine, weight, jnp.finfo(jnp.float32).min)
    found = lax.pmax(jnp.concatenate([bad, places]), axis_name)
    total = found[1:].sum()
    usable = valid & (found[0] == 0) & (total != 0)
    return Agreed(usable, jnp.where(total == 0, 1, total / devices))


def in_means(agree: Agreement, stages: Stages, *, narrow: bool) -> Stages:
    """Returns stages that sum gradients divided by the mean weight.

    Residuals, which codecs keep from one step to the next, are then in the units of
    applied gradients, whatever the weights of the two steps. Stages whose codecs keep
    no state do not divide, because it makes no difference to them, unless a codec is
    `narrow`: products with a weight would leave the range of float16.
    """

    def dividing(weight: Callable[[], jax.Array]) -> Stages:
        def stage(value: Summands, states: CodecStates) -> tuple[Summands, CodecStates]:
            return divided(value, weight()) if states or narrow else value, states

        return Stages((Local(stage),))

    before = dividing(lambda: agree().mean_weight)
    return before + stages + dividing(lambda: 1 / agree().mean_weight)


def divided(value: Summands, weight: jax.Array) -> Summands:
    """Returns the arrays with their gradients divided by a weight."""

    def one(x: jax.Array) -> jax.Array:
        wide = working_dtype(x.dtype)
        return (x.astype(wide) / weight.astype(wide)).astype(x.dtype)

    return value._replace(coded=tuple(map(one, value.coded)))

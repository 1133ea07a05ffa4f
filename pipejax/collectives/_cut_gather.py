"""All-gathers of arrays that are cut along axes of their own.

The stages here turn this device's pieces into the whole arrays, from the pieces of all
devices. All bits of a piece are sent.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax._internal.ravel import ravel
from pipejax._internal.wire import Transfer

from ._combined import size
from ._cut_scatter import Cuts
from ._stages import Local, Sent, Stages, States, local


def gather_arrays(forms: Sequence[Any], cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns one stage with the backend's all-gather of every array."""

    def send(arrays: Any) -> Any:
        return tuple(
            lax.all_gather(x, axis_name, axis=cut, tiled=True)
            for x, cut in zip(arrays, cuts, strict=True)
        )

    p = axis_size(axis_name)
    return Stages(
        (Sent(send, tuple(Transfer("all-gather", p, size(x)) for x in forms)),)
    )


def gather_words(forms: Sequence[Any], cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns one stage that gathers the bits of all arrays, as a vector per width."""
    p = axis_size(axis_name)
    # Between CPU processes, XLA would send bfloat16 as float32, and arrays one by one.
    widths: dict[int, list[int]] = {}
    for i, form in enumerate(forms):
        widths.setdefault(form.dtype.itemsize, []).append(i)

    def words(arrays: Any, states: States) -> tuple[Any, States]:
        bits = [
            ravel([lax.bitcast_convert_type(arrays[i], _word(width)) for i in places])
            for width, places in widths.items()
        ]
        return tuple(bits), states

    def send(vectors: Any) -> Any:
        return tuple(lax.all_gather(x, axis_name) for x in vectors)

    def arrays(rows: Any) -> tuple[jax.Array, ...]:
        found: dict[int, jax.Array] = {}
        for places, row in zip(widths.values(), rows, strict=True):
            ends = np.cumsum([math.prod(forms[i].shape) for i in places])
            for i, end in zip(places, ends, strict=True):
                form, cut = forms[i], cuts[i]
                # Row j has the pieces of device j, of all arrays of this width one
                # after another.
                bits = row[:, int(end) - math.prod(form.shape) : int(end)]
                values = lax.bitcast_convert_type(bits, form.dtype)
                shape = [
                    n * (p if axis == cut else 1) for axis, n in enumerate(form.shape)
                ]
                # The axis of the devices comes right before the axis that was cut. The
                # reshape then joins both, so that the pieces follow one another in the
                # order of the ranks.
                in_order = jnp.moveaxis(values.reshape(p, *form.shape), 0, cut or 0)
                found[i] = in_order.reshape(shape)
        return tuple(found[i] for i in range(len(forms)))

    sizes = [sum(size(forms[i]) for i in places) for places in widths.values()]
    transfers = tuple(Transfer("all-gather", p, n) for n in sizes)
    return Stages((Local(words, encodes=True), Sent(send, transfers))) + local(arrays)


def repeat(forms: Sequence[Any], cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns local work that takes this device's pieces for those of all devices."""
    del forms
    p = axis_size(axis_name)

    def whole(arrays: Any) -> Any:
        pairs = zip(arrays, cuts, strict=True)
        return tuple(jnp.concatenate([x] * p, cut) for x, cut in pairs)

    return local(whole)


def _word(width: int) -> Any:
    return {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[width]

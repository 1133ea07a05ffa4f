"""All-gathers of arrays that are cut along axes of their own.

The stages here turn this device's pieces into the whole arrays, from the pieces of all
devices. All bits of a piece are sent, except by `gather_coded`.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax._internal.ravel import ravel, unravel
from pipejax._internal.wire import Transfer
from pipejax.codecs import Codec

from ._combined import size
from ._cut_scatter import Cuts
from ._grouped import in_order
from ._layout import Layout, Summands
from ._sites import Cut, Parts
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
        found = []
        for places, row in zip(widths.values(), rows, strict=True):
            bits = [jax.ShapeDtypeStruct(forms[i].shape, row.dtype) for i in places]
            # Row j has the pieces of device j, one array after another.
            pieces = jax.vmap(functools.partial(unravel, forms=bits))(row)
            values = (
                lax.bitcast_convert_type(x, forms[i].dtype)
                for i, x in zip(places, pieces, strict=True)
            )
            found.append(_joined(values, [cuts[i] for i in places]))
        return in_order([*widths.values()], found)

    sizes = [sum(size(forms[i]) for i in places) for places in widths.values()]
    transfers = tuple(Transfer("all-gather", p, n) for n in sizes)
    return Stages((Local(words, encodes=True), Sent(send, transfers))) + local(arrays)


def gather_coded(
    codec: Codec, forms: Sequence[Any], cuts: Cuts, axis_name: AxisName, *, silent: bool
) -> Stages:
    """Returns one stage that gathers all arrays as a codec encodes them.

    A device also decodes its own pieces, so that all devices end with the same bits. If
    `silent`, nothing is sent, and its own pieces stand for those of all devices.
    """
    layout, p = Layout(tuple(forms), ()), axis_size(axis_name)
    cut = Cut.of(layout, 1, codec.multiple)
    # The payloads of devices are decoded one by one, and never added up.
    of_one = codec.of(dtype=layout.working_dtype, devices=1)
    site = cut.site("parameters", codec, axis_name)._replace(codec=of_one)

    def own(arrays: Any) -> Parts:
        return jax.tree.map(lambda row: row[0], cut.rows(Summands(tuple(arrays), ())))

    def send(payload: jax.Array) -> jax.Array:
        return lax.all_gather(payload, axis_name)

    def arrays(rows: Parts) -> tuple[jax.Array, ...]:
        # `unravel` ignores the padding at the end of a row.
        pieces = jax.vmap(functools.partial(unravel, forms=forms))(rows.coded)
        return _joined(pieces, cuts)

    sent = Stages((Sent(send, (Transfer("all-gather", p, site.bytes),)),))
    if silent:
        sent = local(lambda payload: jnp.stack([payload] * p))
    return local(own) + site.encoding + sent + local(site.decode) + local(arrays)


def _joined(
    pieces: Iterable[jax.Array], cuts: Sequence[int | None]
) -> tuple[jax.Array, ...]:
    return tuple(_whole(x, cut or 0) for x, cut in zip(pieces, cuts, strict=True))


def _whole(pieces: jax.Array, cut: int) -> jax.Array:
    """Joins the pieces of all devices, [p, ...], to an array."""
    devices, *shape = pieces.shape
    shape[cut] *= devices
    # The axis of the devices comes right before the axis that was cut. The reshape then
    # joins both, so that the pieces follow one another in the order of the ranks.
    return jnp.moveaxis(pieces, 0, cut).reshape(shape)


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

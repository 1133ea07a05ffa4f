"""Reduce-scatters of arrays that are cut along axes of their own.

The stages here turn a tuple of arrays into this device's pieces of their sums.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax._internal.ranges import scaled_down, scaled_up
from pipejax._internal.ravel import ravel, unravel
from pipejax._internal.wire import Transfer

from ._combined import size
from ._layout import Layout
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts
from ._stages import Local, Sent, Stages, States, local

Cuts = tuple[int | None, ...]
"""For each array the axis along which it is cut, or `None` if it stays whole."""


def piece_forms(forms: Sequence[Any], cuts: Cuts, devices: int) -> tuple[Any, ...]:
    def one(form: Any, cut: int | None) -> jax.ShapeDtypeStruct:
        shape = list(form.shape)
        if cut is not None:
            shape[cut] //= devices
        return jax.ShapeDtypeStruct(tuple(shape), form.dtype)

    return tuple(one(*pair) for pair in zip(forms, cuts, strict=True))


def scatter_arrays(layout: Layout, cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns one stage with the backend's reduce-scatter of every array."""
    p = axis_size(axis_name)

    def pack(arrays: Any, states: States) -> tuple[Any, States]:
        # The collective adds in the dtype of the arrays. In float16, a sum over devices
        # could overflow although the mean would not.
        return tuple(scaled_down(x, p) for x in arrays), states

    def send(arrays: Any) -> Any:
        return tuple(
            lax.psum_scatter(x, axis_name, scatter_dimension=cut, tiled=True)
            for x, cut in zip(arrays, cuts, strict=True)
        )

    def unpack(sums: Any) -> Any:
        return tuple(scaled_up(x, p) for x in sums)

    transfers = tuple(Transfer("reduce-scatter", p, size(x)) for x in layout.coded)
    return Stages((Local(pack, encodes=True), Sent(send, transfers))) + local(unpack)


def scatter_rows(
    halves: ScatterGather, layout: Layout, cuts: Cuts, axis_name: AxisName
) -> Stages:
    """Returns an algorithm's reduce-scatter, on the pieces of all arrays as rows."""
    p = axis_size(axis_name)
    cut = Cut.of(layout, p, halves.codec.multiple)
    forms, dtype = piece_forms(layout.sums().coded, cuts, p), layout.working_dtype
    # An array is cut only where p divides an axis, so that the pieces need no padding.
    # A codec may need it, to fill its blocks.
    padding = cut.coded - layout.coded_size // p

    def rows(arrays: Any) -> Parts:
        pairs = zip(arrays, cuts, strict=True)
        pieces = [jnp.split(x, p, axis or 0) for x, axis in pairs]
        zeros = [jnp.zeros(padding, dtype)] if padding else []
        # `pieces` has a list of p pieces for each array. Transposed, row j has the
        # pieces that device j will have. Each row ends with its own padding.
        in_rows = [x for row in zip(*pieces, strict=True) for x in (*row, *zeros)]
        coded = ravel(in_rows, dtype).reshape(p, cut.coded)
        # What travels exactly is not cut, and is summed as a whole elsewhere.
        return Parts(coded, jnp.zeros((p, 0), dtype))

    def own(piece: Parts) -> Any:
        # `unravel` ignores the padding at the end of the row.
        return unravel(piece.coded, forms)

    return local(rows) + halves.reduce_scatter(cut, axis_name) + local(own)


def own_pieces(cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns local work that takes this device's pieces of its own arrays."""
    p, rank = axis_size(axis_name), lax.axis_index(axis_name)

    def pieces(arrays: Any) -> Any:
        found = []
        for x, cut in zip(arrays, cuts, strict=True):
            axis = cut or 0
            length = x.shape[axis] // p
            # A reduce-scatter leaves piece i on device i.
            piece = lax.dynamic_slice_in_dim(x, rank * length, length, axis)
            found.append(piece)
        return tuple(found)

    return local(pieces)

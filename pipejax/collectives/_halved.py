"""An all-reduce in two halves, between which every device has pieces of the sums.

An algorithm such as `two_shot` also consists of two halves, but it cuts one long vector
of all arrays. Here every array is cut along one of its own axes. An optimizer can then
be given pieces of gradients, parameters and moments that belong together:

1. The reduce-scatter leaves each device with its piece of every sum.
2. The all-gather gives every device whole arrays, made from the pieces of all devices.
   It sends all bits.

Arrays that cannot be cut, and those that travel exactly, are summed as a whole in the
first half.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pipejax.mesh import AxisName, axis_size
from pipejax.ranges import scaled_down, scaled_up
from pipejax.vectors import apart, joined

from ._all_reduce import AllReduce
from ._beside import side_by_side
from ._groups import size
from ._layout import Layout, Summands
from ._no_communication import NoCommunication
from ._psum import MIB, Psum
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts
from ._stages import Local, Sent, Stages, States, local, on_first
from ._two_shot import two_shot
from ._wire import Transfer

Cuts = tuple[int | None, ...]
"""For each array the axis along which it is cut, or `None` if it stays whole."""


@dataclasses.dataclass(frozen=True)
class Halved(AllReduce):
    """A reduce-scatter and an all-gather of arrays that are cut along their own axes.

    Attributes:
      all_reduce: The algorithm whose first half sums: `psum()` or an algorithm that has
        halves, with its codec.
      cuts: How each coded array is cut.
      sets: The places of the coded arrays that a codec encodes together. `None` stands
        for all of them.
    """

    all_reduce: AllReduce
    cuts: Cuts
    sets: tuple[tuple[int, ...], ...] | None = None

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages of both halves, which together sum over devices."""
        pieces = piece_forms(layout.sums().coded, self.cuts, axis_size(axis_name))
        gather = self.all_gather(pieces, axis_name)

        def before(sums: Summands, states: States) -> tuple[Any, States]:
            return (sums.coded, sums.exact), states

        def after(value: Any, states: States) -> tuple[Summands, States]:
            return Summands(*value), states

        first = self.reduce_scatter(layout, axis_name)
        return (
            first
            + Stages((Local(before),))
            + on_first(gather)
            + Stages((Local(after),))
        )

    def reduce_scatter(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages that turn arrays into sums, or into a piece of each sum.

        Args:
          layout: Layout of the whole arrays.
          axis_name: Axis or axes of the surrounding `shard_map` to sum over.
        """
        every = range(len(self.cuts))
        left = [i for i in every if self.cuts[i] is None]
        sets = [
            [i for i in places if self.cuts[i] is not None]
            for places in self.sets or (every,)
        ]
        sets = [places for places in sets if places]
        whole = tuple(layout.coded[i] for i in left)
        parts = [
            self._scattered(
                layout._replace(coded=_chosen(layout.coded, places), exact=()),
                _chosen(self.cuts, places),
                axis_name,
            )
            for places in sets
        ]
        parts.append(self._whole(Layout((), (*whole, *layout.exact)), axis_name))

        def begin(arrays: Summands) -> list[Any]:
            exact = (*_chosen(arrays.coded, left), *arrays.exact)
            cut = [_chosen(arrays.coded, places) for places in sets]
            return [*cut, Summands((), exact)]

        def finish(values: list[Any]) -> Summands:
            *cut, (_, exact) = values
            places = [i for own in (*sets, left) for i in own]
            arrays = [x for own in (*cut, exact[: len(left)]) for x in own]
            in_order = sorted(zip(places, arrays, strict=True), key=lambda x: x[0])
            coded = tuple(x for _, x in in_order)
            return Summands(coded, tuple(exact[len(left) :]))

        return local(begin) + side_by_side(parts) + local(finish)

    def all_gather(self, forms: Sequence[Any], axis_name: AxisName) -> Stages:
        """Returns one stage that makes whole arrays from the pieces of all devices.

        Its value is a tuple of arrays. Those that are not cut stay as they are.

        Args:
          forms: Shapes and dtypes of the pieces.
          axis_name: Axis or axes of the surrounding `shard_map`.
        """
        at = [i for i, cut in enumerate(self.cuts) if cut is not None]
        if not at:
            return local(tuple)
        own, cuts = _chosen(forms, at), _chosen(self.cuts, at)
        gather = _gather_arrays if self._native else _gather_words
        if self.silent:
            gather = _repeat

        def begin(arrays: Sequence[jax.Array]) -> Any:
            return _chosen(arrays, at), tuple(arrays)

        def finish(value: Any) -> tuple[jax.Array, ...]:
            gathered, arrays = value
            found = dict(zip(at, gathered, strict=True))
            return tuple(found.get(i, x) for i, x in enumerate(arrays))

        return local(begin) + on_first(gather(own, cuts, axis_name)) + local(finish)

    @property
    def silent(self) -> bool:
        """Returns whether nothing is sent: devices take their own arrays for sums."""
        return isinstance(self.all_reduce, NoCommunication)

    @property
    def _native(self) -> bool:
        """Returns whether the backend's own collectives send every array alone."""
        return isinstance(self.all_reduce, Psum) and self.all_reduce.scatters

    def _whole(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages that sum arrays as a whole."""
        if isinstance(self.all_reduce, Psum | NoCommunication):
            return self.all_reduce(layout, axis_name)
        return Psum(None, MIB)(layout, axis_name)

    def _scattered(self, layout: Layout, cuts: Cuts, axis_name: AxisName) -> Stages:
        """Returns the stages that turn a tuple of arrays into pieces of their sums."""
        if self.silent:
            return _own_pieces(cuts, axis_name)
        if self._native:
            return _scatter_arrays(layout, cuts, axis_name)
        halves = self.all_reduce if isinstance(self.all_reduce, ScatterGather) else None
        return _scatter_rows(halves or two_shot(), layout, cuts, axis_name)


def has_halves(all_reduce: AllReduce, devices: int) -> bool:
    """Returns whether `Halved` takes an algorithm.

    Args:
      all_reduce: The algorithm.
      devices: Number of devices.
    """
    if isinstance(all_reduce, NoCommunication):
        return True
    if isinstance(all_reduce, Psum):
        return all_reduce.codec is None
    if isinstance(all_reduce, ScatterGather):
        return all_reduce.pieces(devices) == devices
    return False


def piece_forms(forms: Sequence[Any], cuts: Cuts, devices: int) -> tuple[Any, ...]:
    """Returns the shapes and dtypes of the pieces of arrays.

    Args:
      forms: Shapes and dtypes of the arrays.
      cuts: How each array is cut.
      devices: Number of devices, which have a piece each.
    """

    def one(form: Any, cut: int | None) -> jax.ShapeDtypeStruct:
        shape = list(form.shape)
        if cut is not None:
            shape[cut] //= devices
        return jax.ShapeDtypeStruct(tuple(shape), form.dtype)

    return tuple(one(*pair) for pair in zip(forms, cuts, strict=True))


def _chosen(items: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """Returns the items at some places."""
    return tuple(items[i] for i in places)


def _scatter_arrays(layout: Layout, cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns one stage with the backend's reduce-scatter of every array."""
    p = axis_size(axis_name)

    def pack(arrays: Any, states: States) -> tuple[Any, States]:
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


def _scatter_rows(
    halves: ScatterGather, layout: Layout, cuts: Cuts, axis_name: AxisName
) -> Stages:
    """Returns the reduce-scatter of an algorithm, on the pieces of all arrays as rows.

    Row j is one vector of the pieces that device j will have.
    """
    p = axis_size(axis_name)
    cut = Cut.of(layout, p, halves.codec.multiple)
    forms, dtype = piece_forms(layout.sums().coded, cuts, p), layout.working_dtype
    padding = cut.coded - layout.coded_size // p

    def rows(arrays: Any) -> Parts:
        pairs = zip(arrays, cuts, strict=True)
        pieces = [jnp.split(x, p, axis or 0) for x, axis in pairs]
        zeros = [jnp.zeros(padding, dtype)] if padding else []
        in_rows = [x for row in zip(*pieces, strict=True) for x in (*row, *zeros)]
        coded = joined(in_rows, dtype).reshape(p, cut.coded)
        return Parts(coded, jnp.zeros((p, 0), dtype))

    def own(piece: Parts) -> Any:
        return apart(piece.coded, forms)

    return local(rows) + halves.reduce_scatter(cut, axis_name) + local(own)


def _gather_arrays(forms: Sequence[Any], cuts: Cuts, axis_name: AxisName) -> Stages:
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


def _gather_words(forms: Sequence[Any], cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns one stage that gathers the bits of all arrays, as a vector per width.

    Between CPU processes, XLA would send bfloat16 as float32, and arrays one by one.
    """
    p = axis_size(axis_name)
    widths: dict[int, list[int]] = {}
    for i, form in enumerate(forms):
        widths.setdefault(form.dtype.itemsize, []).append(i)

    def words(arrays: Any, states: States) -> tuple[Any, States]:
        bits = [
            joined([lax.bitcast_convert_type(arrays[i], _word(width)) for i in places])
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
                bits = row[:, int(end) - math.prod(form.shape) : int(end)]
                values = lax.bitcast_convert_type(bits, form.dtype)
                shape = [
                    n * (p if axis == cut else 1) for axis, n in enumerate(form.shape)
                ]
                in_order = jnp.moveaxis(values.reshape(p, *form.shape), 0, cut or 0)
                found[i] = in_order.reshape(shape)
        return tuple(found[i] for i in range(len(forms)))

    sizes = [sum(size(forms[i]) for i in places) for places in widths.values()]
    transfers = tuple(Transfer("all-gather", p, n) for n in sizes)
    return Stages((Local(words, encodes=True), Sent(send, transfers))) + local(arrays)


def _own_pieces(cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns local work that takes this device's pieces of its own arrays."""
    p, rank = axis_size(axis_name), lax.axis_index(axis_name)

    def pieces(arrays: Any) -> Any:
        found = []
        for x, cut in zip(arrays, cuts, strict=True):
            axis = cut or 0
            length = x.shape[axis] // p
            piece = lax.dynamic_slice_in_dim(x, rank * length, length, axis)
            found.append(piece)
        return tuple(found)

    return local(pieces)


def _repeat(forms: Sequence[Any], cuts: Cuts, axis_name: AxisName) -> Stages:
    """Returns local work that takes this device's pieces for those of all devices."""
    del forms
    p = axis_size(axis_name)

    def whole(arrays: Any) -> Any:
        pairs = zip(arrays, cuts, strict=True)
        return tuple(jnp.concatenate([x] * p, cut) for x, cut in pairs)

    return local(whole)


def _word(width: int) -> Any:
    """Returns the unsigned integer dtype of a width in bytes."""
    return {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[width]

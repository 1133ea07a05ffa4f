"""An all-reduce in two halves, between which every device has pieces of the sums.

Unlike in `two_shot`, which cuts one long vector, every array is cut along one of its
own axes. An optimizer can then be given pieces of gradients, parameters and moments
that belong together. Arrays that cannot be cut, and those that travel exactly, are
summed as a whole in the first half. The all-gather sends arrays as they are, or what a
codec of its own encodes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec

from ._all_reduce import AllReduce
from ._cut_gather import gather_arrays, gather_coded, gather_words, repeat
from ._cut_scatter import Cuts, own_pieces, piece_forms, scatter_arrays, scatter_rows
from ._grouped import in_order, side_by_side
from ._layout import Layout, Summands
from ._no_communication import NoCommunication
from ._psum import MIB, Psum
from ._scatter_gather import ScatterGather
from ._scheduled import ScheduledAllReduce
from ._stages import Stages, local, on_first
from ._two_shot import two_shot

Gather = Callable[[Sequence[Any], Cuts, AxisName], Stages]


@dataclasses.dataclass(frozen=True)
class ReduceScatterAllGather(AllReduce):
    """A reduce-scatter and an all-gather of arrays that are cut along their own axes.

    Attributes:
      all_reduce: The algorithm whose first half sums: `psum()` or an algorithm that has
        halves, with its codec, or a phase of a schedule with either.
      cuts: How each coded array is cut.
      sets: The places of the coded arrays that a codec encodes together. `None` stands
        for all of them.
      gather_codec: Encodes arrays of the all-gather. It has no state. `None` encodes
        nothing.
      gather_sets: The places of the arrays of the all-gather that `gather_codec`
        encodes together. All others are not encoded.
    """

    all_reduce: AllReduce
    cuts: Cuts
    sets: tuple[tuple[int, ...], ...] | None = None
    gather_codec: Codec | None = None
    gather_sets: tuple[tuple[int, ...], ...] = ()

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages of both halves, which together sum over devices."""
        pieces = piece_forms(layout.sums().coded, self.cuts, axis_size(axis_name))
        # The gather takes only the coded arrays. The exact ones are whole already.
        return (
            self.reduce_scatter(layout, axis_name)
            + on_first(self.all_gather(pieces, axis_name))
            + local(lambda value: Summands(*value))
        )

    def reduce_scatter(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages that turn arrays into sums, or into a piece of each sum.

        Args:
          layout: Layout of the whole arrays.
          axis_name: Axis or axes of the surrounding `shard_map` to sum over.
        """
        every = range(len(self.cuts))
        # An optimizer can be given pieces only of arrays that are cut along one axis
        # into equal parts. All others are summed as a whole, and exactly.
        left = [i for i in every if self.cuts[i] is None]
        sets = [
            [i for i in places if self.cuts[i] is not None]
            for places in self.sets or (every,)
        ]
        # A set whose arrays all stay whole would be an all-reduce of nothing.
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
        # Side by side with the others, the sum of the whole arrays adds no stage.
        parts.append(self._whole(Layout((), (*whole, *layout.exact)), axis_name))
        scatter = side_by_side(parts)
        if isinstance(self.all_reduce, ScheduledAllReduce):
            # A phase adds its number to the names of states. The parts were made by
            # its algorithm alone, so the number is added here.
            scatter = self.all_reduce.named(scatter)

        def begin(arrays: Summands) -> list[Any]:
            exact = (*_chosen(arrays.coded, left), *arrays.exact)
            cut = [_chosen(arrays.coded, places) for places in sets]
            return [*cut, Summands((), exact)]

        def finish(values: list[Any]) -> Summands:
            *cut, (_, exact) = values
            coded = in_order((*sets, left), (*cut, exact[: len(left)]))
            return Summands(coded, tuple(exact[len(left) :]))

        return local(begin) + scatter + local(finish)

    def all_gather(self, forms: Sequence[Any], axis_name: AxisName) -> Stages:
        """Returns one stage that makes whole arrays from the pieces of all devices.

        Its value is a tuple of arrays. Those that are not cut stay as they are.

        Args:
          forms: Shapes and dtypes of the pieces.
          axis_name: Axis or axes of the surrounding `shard_map`.
        """
        gathers = self._gathers()
        if not gathers:
            return local(tuple)
        sets = [places for places, _ in gathers]
        parts = [
            gather(_chosen(forms, places), _chosen(self.cuts, places), axis_name)
            for places, gather in gathers
        ]

        def begin(arrays: Sequence[jax.Array]) -> Any:
            # Arrays that are not cut stay in the second place of the pair while others
            # are sent.
            return [_chosen(arrays, places) for places in sets], tuple(arrays)

        def finish(value: Any) -> tuple[jax.Array, ...]:
            gathered, arrays = value
            at = [i for places in sets for i in places]
            found = dict(zip(at, itertools.chain(*gathered), strict=True))
            return tuple(found.get(i, x) for i, x in enumerate(arrays))

        return local(begin) + on_first(side_by_side(parts)) + local(finish)

    def _gathers(self) -> list[tuple[list[int], Gather]]:
        """Returns the places of arrays to gather together, each with how."""
        at = {i for i, cut in enumerate(self.cuts) if cut is not None}
        exact: Gather = gather_arrays if self._native else gather_words
        exact = repeat if self.silent else exact
        if self.gather_codec is None:
            return [(sorted(at), exact)] if at else []
        coded: Gather = functools.partial(
            gather_coded, self.gather_codec, silent=self.silent
        )
        sets = [at.intersection(places) for places in self.gather_sets]
        pairs = ((at.difference(*sets), exact), *((places, coded) for places in sets))
        return [(sorted(places), gather) for places, gather in pairs if places]

    @property
    def silent(self) -> bool:
        """Returns whether nothing is sent: devices take their own arrays for sums."""
        return isinstance(self._sums_by, NoCommunication)

    @property
    def _sums_by(self) -> AllReduce:
        """Returns the algorithm that sums, which may be that of a phase."""
        phase = self.all_reduce
        return phase.all_reduce if isinstance(phase, ScheduledAllReduce) else phase

    @property
    def _native(self) -> bool:
        """Returns whether the backend's own collectives send every array alone."""
        return isinstance(self._sums_by, Psum) and self._sums_by.scatters

    def _whole(self, layout: Layout, axis_name: AxisName) -> Stages:
        if isinstance(self._sums_by, Psum | NoCommunication):
            return self._sums_by(layout, axis_name)
        # The other algorithms would cut one vector of these arrays, and need both
        # halves for it. The backend needs one stage, with arrays below 1 MiB as one
        # vector.
        return Psum(None, MIB)(layout, axis_name)

    def _scattered(self, layout: Layout, cuts: Cuts, axis_name: AxisName) -> Stages:
        """Returns the stages that turn a tuple of arrays into pieces of their sums."""
        if self.silent:
            return own_pieces(cuts, axis_name)
        if self._native:
            return scatter_arrays(layout, cuts, axis_name)
        # Where the reduce-scatter of `psum` cannot be used, that of `two_shot` takes
        # its place, because it is a single collective.
        halves = self._sums_by if isinstance(self._sums_by, ScatterGather) else None
        return scatter_rows(halves or two_shot(), layout, cuts, axis_name)


def has_reduce_scatter(all_reduce: AllReduce, devices: int) -> bool:
    """Returns whether `ReduceScatterAllGather` takes an algorithm.

    Args:
      all_reduce: The algorithm.
      devices: Number of devices.
    """
    if isinstance(all_reduce, ScheduledAllReduce):
        return has_reduce_scatter(all_reduce.all_reduce, devices)
    if isinstance(all_reduce, NoCommunication):
        return True
    if isinstance(all_reduce, Psum):
        return all_reduce.codec is None
    if isinstance(all_reduce, ScatterGather):
        return all_reduce.pieces(devices) == devices
    return False


def _chosen(items: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    return tuple(items[i] for i in places)

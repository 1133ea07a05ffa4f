"""An all-reduce of a sharded model: every device sums the shards that it holds.

The devices of a group hold one copy of the model together. A device exchanges its
shards with the devices that hold the same shards in other groups. The shards are cut
out before the first stage and put together after the last one, without a collective
inside the group.

A device may also hold arrays that others in its group hold too, because they are not
split over all inner axes. Their sums must be the same on all these devices, bit for
bit. A codec must therefore not encode them in one vector with arrays that are split
further: the scale of a block, for example, would depend on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pipejax._internal.mesh import AxisName
from pipejax._internal.shards import group_axes, on_shards, shard_form, split_axes

from ._all_reduce import AllReduce
from ._grouped import Grouped
from ._layout import Layout, Summands
from ._reduce_scatter_all_gather import ReduceScatterAllGather
from ._stages import Link, Local, Sent, Stages, States


@dataclasses.dataclass(frozen=True)
class Sharded(AllReduce):
    """An all-reduce over groups, which every device runs on its own shards.

    Attributes:
      all_reduce: The algorithm.
      coded: How the arrays that a codec may compress are split over inner axes.
      exact: How the arrays that always travel exactly are split over inner axes.
    """

    all_reduce: AllReduce
    coded: tuple[P, ...]
    exact: tuple[P, ...] = ()

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Returns the stages for arrays in the shapes that they have in a group."""
        mesh, _ = group_axes()
        own = self.of_one_device(mesh.shape)
        # The stages are those of one device and know nothing of the group. They are
        # made for the shapes of its shards.
        stages = own(self.shard(layout, mesh.shape), axis_name)
        specs = Summands(self.coded, self.exact)
        return on_own_shards(stages, specs, specs)

    def of_one_device(self, sizes: Any) -> Grouped | ReduceScatterAllGather:
        """Returns the algorithm that a device runs on its shards, for inner `sizes`."""
        if isinstance(self.all_reduce, ReduceScatterAllGather):
            return dataclasses.replace(self.all_reduce, sets=self.sets(sizes))
        return Grouped(self.all_reduce, self.sets(sizes))

    def sets(self, sizes: Any) -> tuple[tuple[int, ...], ...]:
        """Returns which coded arrays are encoded together, for inner `sizes`."""
        # Without coded arrays, one empty set carries what travels exactly.
        return sets_by_axes(self.coded, sizes) or ((),)

    def shard(self, layout: Layout, sizes: Any) -> Layout:
        """Returns the layout of the shards of one device.

        Args:
          layout: The layout of the arrays of a group.
          sizes: The sizes of the inner axes, by name.
        """
        coded = zip(layout.coded, self.coded, strict=True)
        exact = zip(layout.exact, self.exact, strict=True)
        return layout._replace(
            coded=tuple(shard_form(form, spec, sizes) for form, spec in coded),
            exact=tuple(shard_form(form, spec, sizes) for form, spec in exact),
        )


def sets_by_axes(specs: Sequence[P], sizes: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the places of arrays that are split over the same inner axes.

    They are held by the same devices of a group. Encoded apart from all others, they
    have the same payload on each of these.

    Args:
      specs: How each array is split over inner axes.
      sizes: The sizes of the inner axes, by name.
    """
    sets: dict[frozenset[str], list[int]] = {}
    for place, spec in enumerate(specs):
        sets.setdefault(split_axes(spec, sizes), []).append(place)
    return tuple(map(tuple, sets.values()))


def on_own_shards(stages: Stages, before: Any, after: Any) -> Stages:
    """Returns stages in which every device of a group works on its own shards.

    Between links, a value has a new first axis, along which the values of all devices
    of a group are concatenated. Codec states are concatenated along their first axis.

    Args:
      stages: The stages on one device.
      before: Partition specs, over inner axes, of the value before the first stage.
      after: Partition specs of the value after the last stage.
    """
    _, inner = group_axes()
    # A value between links differs between the devices of a group. With a new first
    # axis, of length 1 on each device, the values are one array of the group.
    each = P(inner)

    def enter(value: Any, states: States) -> tuple[Any, States]:
        return on_shards(_rows, (before,), each)(value), states

    def leave(rows: Any, states: States) -> tuple[Any, States]:
        return on_shards(_row, (each,), after)(rows), states

    def on_own(link: Link) -> Link:
        if isinstance(link, Sent):

            def send(value: Any) -> Any:
                return _rows(link.run(_row(value)))

            return link._replace(run=on_shards(send, (each,), each))

        def run(value: Any, states: States) -> tuple[Any, States]:
            # States have no new axis: none is a scalar, so they are concatenated as
            # they are.
            value, states = link.run(_row(value), states)
            return _rows(value), states

        return link._replace(run=on_shards(run, (each, each), (each, each)))

    def init_of(init: Callable[[str], States]) -> Callable[[str], States]:
        return lambda prefix: on_shards(functools.partial(init, prefix), (), each)()

    links = Local(enter), *map(on_own, stages.links), Local(leave)
    return Stages(links, tuple(map(init_of, stages.inits)))


def _rows(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _row(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)

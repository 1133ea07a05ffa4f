"""Hierarchical: few bytes over the slow links between hosts, many over the fast inside.

Over a mesh of ("host", "device"), d devices a host:

1. reduce-scatter inside each host: device j has its host's sum of piece j
2. all-reduce of piece j over the j-th devices of all hosts
3. all-gather inside each host

Between hosts every device moves a d-th of the vector. Compression pays where links are
slow, in 2; in 1 and 3 it would add errors and save time that is not spent.
"""

import dataclasses

import jax

from pipejax.mesh import AxisName, axes, axis_size

from ._all_reduce import AllReduce
from ._layout import Layout, Summands
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts
from ._stages import Stages, local, renamed
from ._two_shot import two_shot


@dataclasses.dataclass(frozen=True)
class Hierarchical(AllReduce):
    """See `hierarchical`."""

    inner: ScatterGather
    outer: AllReduce

    @property
    def axes(self) -> int:
        """Two: over hosts, over the devices of one."""
        return 2

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        """Scatter inside, all-reduce between, gather inside."""
        self.check_axes(axis_name)
        between, inside = axes(axis_name)
        devices = axis_size(inside)
        if self.inner.pieces(devices) != devices:
            raise ValueError(
                "`inner` must give every device of a host a piece: halving_doubling"
                f" does for 1, 2, 4, 8, ... devices, got {devices}. Choose two_shot or"
                " ring, which take any number."
            )
        layout = layout._replace(drawing=axis_name)
        cut = Cut.of(layout, devices, self.inner.codec.multiple)
        sizes, dtype = (cut.coded, cut.exact), layout.working_dtype
        coded, exact = (jax.ShapeDtypeStruct((size,), dtype) for size in sizes)
        piece = Layout((coded,), (exact,), whole=False, drawing=axis_name)
        return (
            local(cut.rows)
            + renamed(self.inner.reduce_scatter(cut, inside), "inner ")
            + local(lambda x: Summands((x.coded,), (x.exact,)))
            + renamed(self.outer(piece, between), "outer ")
            + local(lambda x: Parts(*x.coded, *x.exact))
            + renamed(self.inner.all_gather(cut, inside), "inner ")
            + local(cut.arrays)
        )


def hierarchical(
    inner: ScatterGather | None = None, outer: AllReduce | None = None
) -> Hierarchical:
    """Sums inside each host, between hosts, and hands out inside again.

    Args:
      inner: `two_shot`, `ring` or `halving_doubling`; by default `two_shot()`, which
        sends all bits. With a codec it compresses inside hosts too.
      outer: any other algorithm, of a d-th of the vector; by default `two_shot()`. Its
        codec is what travels between hosts.

    Raises:
      ValueError: for an inner one that has no two halves; in use, for a single axis.
    """
    inner = two_shot() if inner is None else inner
    outer = two_shot() if outer is None else outer
    if not isinstance(inner, ScatterGather):
        raise ValueError(
            "`inner` must be a reduce-scatter and an all-gather:"
            f" pj.collectives.two_shot, ring or halving_doubling; got {inner!r}."
        )
    if not isinstance(outer, AllReduce) or outer.axes is not None:
        raise ValueError(
            f"`outer` must be an algorithm over one axis, got {outer!r}. For example"
            " pj.collectives.two_shot(pj.codecs.int8())."
        )
    return Hierarchical(inner, outer)

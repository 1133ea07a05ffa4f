"""Hierarchical all-reduce: few bytes cross the slow links between hosts."""

import dataclasses

import jax
from jax.sharding import Mesh

from pipejax._internal.mesh import AxisName, axes, axis_size

from ._all_reduce import AllReduce
from ._layout import Layout, Summands
from ._scatter_gather import ScatterGather
from ._sites import Cut, Parts
from ._stages import Stages, inside_hosts, local, renamed
from ._two_shot import two_shot


@dataclasses.dataclass(frozen=True)
class Hierarchical(AllReduce):
    inner: ScatterGather
    outer: AllReduce

    @property
    def axes(self) -> int:
        return 2

    def on(self, mesh: Mesh) -> "Hierarchical":
        return dataclasses.replace(self, outer=self.outer.on(mesh))

    def unmerged(self) -> "Hierarchical":
        return dataclasses.replace(self, outer=self.outer.unmerged())

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        self.check_axes(axis_name)
        between, inside = axes(axis_name)
        devices = axis_size(inside)
        if self.inner.pieces(devices) != devices:
            raise ValueError(
                "`inner` must give every device of a host a piece: halving_doubling"
                f" does so for 1, 2, 4, 8, ... devices of a host, got {devices}. Choose"
                " two_shot or ring, which take any number of devices."
            )
        # Each half sums over one of the axes. Devices of different hosts must draw
        # different random numbers, and a sum has summands of all devices.
        layout = layout._replace(over=axis_name)
        cut = Cut.of(layout, devices, self.inner.codec.multiple)
        sizes, dtype = (cut.coded, cut.exact), layout.working_dtype
        coded, exact = (jax.ShapeDtypeStruct((size,), dtype) for size in sizes)
        # The sums must end with the same bits on all hosts, so that the owners of a
        # piece must encode it alike.
        gathered = cut._replace(layout=layout._replace(drawn=inside))
        piece = Layout((coded,), (exact,), whole=False, over=axis_name)
        return (
            local(cut.rows)
            + inside_hosts(renamed(self.inner.reduce_scatter(cut, inside), "inner "))
            + local(lambda x: Summands((x.coded,), (x.exact,)))
            + renamed(self.outer(piece, between), "outer ")
            + local(lambda x: Parts(*x.coded, *x.exact))
            + inside_hosts(renamed(self.inner.all_gather(gathered, inside), "inner "))
            + local(cut.arrays)
        )


def hierarchical(
    inner: ScatterGather | None = None, outer: AllReduce | None = None
) -> Hierarchical:
    r"""Sums inside each host, then between hosts, and gathers inside each host.

    1. Reduce-scatter inside each host of d devices. Device j of a host then has piece j
       of the sum of the host's vectors.
    2. All-reduce of piece j, 1/d of the vector, over the j-th devices of all hosts.
    3. All-gather inside each host.

    It needs a mesh with the axes ("host", "device"). A codec pays in step 2, where
    links are slow. If `outer` is `two_shot(C)` with a codec C, every device ends with

    $$C(\sum_h C(s_h))$$

    where `s_h` is the exact sum over the devices of host h. On H hosts, a device then
    sends `2 (H-1)/(H d)` payloads of a whole vector to other hosts.

    Args:
      inner: The algorithm inside each host: `two_shot`, `ring` or `halving_doubling`.
        Its codec also compresses what devices send inside hosts. The default is
        `two_shot()`, which encodes nothing.
      outer: The algorithm between hosts, any one over one axis. Its codec compresses
        what devices send between hosts. The default is `two_shot()`.

    Returns:
      An `AllReduce` over two axes, such as `("host", "device")`.

    Raises:
      ValueError: If `inner` does not consist of a reduce-scatter and an all-gather, or
        if `outer` is not an algorithm over one axis. In use, if `axis_name` does not
        name two axes, or if `inner` is `halving_doubling` and the number of devices of
        a host is not a power of two.

    Examples:
      What each device of 2 hosts with 4 devices sends for 1,000 elements of float32.
      The two axes of `jax.vmap` stand for hosts and devices.

      >>> import jax
      >>> from pipejax.collectives import Layout, hierarchical
      >>> def show():
      ...     layout = Layout.of_shapes(((1000,),))
      ...     for x in hierarchical()(layout, ("host", "device")).transfers:
      ...         print(f"{x.kind} of {x.devices} devices: {x.wire_bytes:.0f} bytes")
      >>> one_host = jax.vmap(show, axis_name="device", axis_size=4)
      >>> jax.vmap(one_host, axis_name="host", axis_size=2)()
      all-to-all of 4 devices: 3000 bytes
      all-to-all of 2 devices: 500 bytes
      all-gather of 2 devices: 500 bytes
      all-gather of 4 devices: 3000 bytes

    References:
      Cho et al., BlueConnect, MLSys 2019,
      https://proceedings.mlsys.org/paper_files/paper/2019/hash/0c8abcf158ed12d0dd94480681186fda-Abstract.html
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
            f"`outer` must be an algorithm over one axis, got {outer!r}. Pass for"
            " example pj.collectives.two_shot(pj.codecs.int8())."
        )
    return Hierarchical(inner, outer)

"""Sums of the rounds of a linear codec by any algorithm, and so with any codec."""

import dataclasses
import functools
from typing import cast

from jax.sharding import Mesh

from pipejax._internal.mesh import AxisName, axis_size
from pipejax.codecs import Codec, Linear, check_codec

from ._all_reduce import AllReduce
from ._layout import Layout
from ._linear_rounds import LinearRounds
from ._stages import Stages


@dataclasses.dataclass(frozen=True)
class InRounds(AllReduce):
    codec: Linear
    all_reduce: AllReduce

    @property
    def axes(self) -> int | None:
        return self.all_reduce.axes

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        self.check_axes(axis_name)
        p = axis_size(axis_name)
        codec = cast(Linear, self.codec.of(layout.shapes, layout.working_dtype, p))
        total = functools.partial(self._total, axis_name=axis_name)
        return LinearRounds(codec, layout, total).stages()

    def on(self, mesh: Mesh) -> "InRounds":
        return dataclasses.replace(self, all_reduce=self.all_reduce.on(mesh))

    def unmerged(self) -> "InRounds":
        return dataclasses.replace(self, all_reduce=self.all_reduce.unmerged())

    def _total(self, layout: Layout, axis_name: AxisName) -> Stages:
        # The vector of a round has no leaves that a codec could be told of.
        return self.all_reduce(layout._replace(whole=False), axis_name)


def in_rounds(codec: Codec, all_reduce: AllReduce) -> InRounds:
    r"""Sums the rounds of a linear codec with an algorithm that has a codec of its own.

    `psum(power_sgd(rank, key))` sums the matrices `P` and `Q` in float32. Here they are
    summed by `all_reduce`, for example with eight bits for each of their elements:

    1. The codec projects the gradients of each device to the vector of a round.
    2. `all_reduce` sums these vectors over devices.
    3. After the last round, the codec rebuilds the sum of the gradients.

    With C the codec of `two_shot`, the products of PowerSGD become

    $$P = C(\sum_i C(M_i Q)), \quad Q = C(\sum_i C(M_i^T P))$$

    All vectors and small matrices, which `power_sgd` sends as they are, travel with the
    second round, and so through C. What C loses is not in the residual of
    `error_feedback(power_sgd(rank, key))`. Choose a codec that loses little, such as
    `int8()`.

    Args:
      codec: A linear codec: `power_sgd`, `acp_sgd` or `random_k`, with or without
        `error_feedback`.
      all_reduce: The algorithm that sums each round.

    Returns:
      An `AllReduce` over as many axes as `all_reduce`.

    Raises:
      ValueError: If `codec` is not a linear codec, or `all_reduce` not an algorithm.

    Examples:
      The rank-1 matrices of a 64 x 32 matrix, with 4 bytes and with 1 for each element
      and a scale. The axis of `jax.vmap` stands for 4 devices.

      >>> import jax
      >>> from pipejax import codecs
      >>> from pipejax.collectives import Layout, in_rounds, psum, two_shot
      >>> codec = codecs.error_feedback(codecs.power_sgd(1, jax.random.key(0)))
      >>> def show():
      ...     for way in (psum(codec), in_rounds(codec, two_shot(codecs.int8(8)))):
      ...         stages = way(Layout.of_shapes(((64, 32),)), "data")
      ...         print(sum(x.wire_bytes for x in stages.transfers))
      >>> jax.vmap(show, axis_name="data", axis_size=4)()
      576.0
      216.0

    References:
      Vogels et al., PowerSGD, NeurIPS 2019, https://arxiv.org/abs/1905.13727
    """
    if not check_codec(codec).rounds:
        raise ValueError(
            "`codec` must be linear, pj.codecs.power_sgd, acp_sgd or random_k, whose"
            f" rounds can be summed; got {codec!r}. Pass any other codec to the"
            " algorithm itself."
        )
    if not isinstance(all_reduce, AllReduce):
        raise ValueError(
            "`all_reduce` must be an algorithm such as"
            f" pj.collectives.two_shot(pj.codecs.int8()); got {all_reduce!r}."
        )
    return InRounds(cast(Linear, codec), all_reduce)

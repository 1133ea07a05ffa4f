"""D-Sync as a transformation: the mean over devices, by any algorithm and codec."""

from collections.abc import Callable

import optax

from pipejax.codecs import Codec
from pipejax.collectives import AllReduce, two_shot
from pipejax.mesh import AxisName

from ._pipelined_mean import pipelined_mean


def all_reduce_mean(
    axis_name: AxisName,
    algorithm: Callable[[Codec | None], AllReduce] = two_shot,
    codec: Codec | None = None,
) -> optax.GradientTransformation:
    """Replaces gradients by their mean over devices, in the same step.

      `update(g_i[t]) = 1/p sum_i g_i[t]`

    It is `pipelined_mean(axis_name, width=1, all_reduce=algorithm(codec))`, with what
    the codec keeps in the state.

      `optax.chain(pj.transforms.all_reduce_mean("data", pj.collectives.ring,
      pj.codecs.error_feedback(pj.codecs.int4())), optax.adam(1e-3))`

    Args:
      axis_name: the axis of the surrounding `shard_map` or `pmap`, or two of them.
      algorithm: of `pj.collectives`, not yet called: `two_shot`, `ring`, ...
      codec: what travels; `None` sends all bits.

    Returns:
      A transformation, as `pipelined_mean` does.

    Raises:
      ValueError: for an algorithm that is called already; as `algorithm` and
        `pipelined_mean`.
    """
    if isinstance(algorithm, AllReduce):
        raise ValueError(
            "`algorithm` must be a function of a codec, not yet called, such as"
            f" pj.collectives.ring; got {algorithm!r}. Pass a codec as `codec`."
        )
    return pipelined_mean(axis_name, width=1, all_reduce=algorithm(codec))

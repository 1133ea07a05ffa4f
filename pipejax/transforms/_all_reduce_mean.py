"""Synchronous averaging as a transformation, with any algorithm and codec."""

from collections.abc import Callable

import optax

from pipejax._internal.mesh import AxisName
from pipejax.codecs import Codec
from pipejax.collectives import AllReduce, two_shot

from ._pipelined_mean import pipelined_mean


def all_reduce_mean(
    axis_name: AxisName,
    algorithm: Callable[[Codec | None], AllReduce] = two_shot,
    codec: Codec | None = None,
) -> optax.GradientTransformation:
    r"""Replaces gradients by their mean over devices, in the same step.

    This is the averaging of D-Sync, the synchronous method. With the gradient `g_{i,t}`
    of device i in step t and p devices:

    $$update(g_{i,t}) = 1/p \sum_j g_{j,t}$$

    The function is short for
    `pipelined_mean(axis_name, width=1, all_reduce=algorithm(codec))`, and the state of
    the transformation holds the codec states. Put it before an optimizer, for example
    `optax.chain(all_reduce_mean("data", pj.collectives.ring, codec), optax.adam(1e-3))`
    with `codec = pj.codecs.error_feedback(pj.codecs.int4())`.

    Args:
      axis_name: The axis of the surrounding `shard_map` or `pmap`, or a tuple of axes.
      algorithm: A function of `pj.collectives` from a codec to an algorithm, such as
        `two_shot` or `ring`. Pass the function itself, without calling it.
      codec: Encodes what is sent. `None` sends all bits.

    Returns:
      A transformation, to be used as that of `pipelined_mean`.

    Raises:
      ValueError: If `algorithm` has already been called, or if `algorithm` or
        `pipelined_mean` raises a `ValueError`.
    """
    if isinstance(algorithm, AllReduce):
        raise ValueError(
            "`algorithm` must be a function of a codec, not yet called, such as"
            f" pj.collectives.ring; got {algorithm!r}. Pass a codec as `codec`."
        )
    return pipelined_mean(axis_name, width=1, all_reduce=algorithm(codec))

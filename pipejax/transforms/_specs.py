"""What of a state every device has for itself."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pipejax.mesh import AxisName
from pipejax.message import InFlight

from ._compress import CompressState


def state_specs(tree: Any, axis_name: AxisName = "data") -> Any:
    """Partition specs of a state that holds gradients in flight, or what codecs keep.

    Every device has its own of both and shares all else: `P(axis_name)` for a
    `InFlight` or a `CompressState`, `P()` for every other leaf.

    Args:
      tree: an optimizer state, a Flax `TrainState`, any pytree, or its `eval_shape`.
      axis_name: the axis given to `pipelined_mean`.

    Returns:
      A pytree prefix of `tree` for the `in_specs` and `out_specs` of `shard_map`.
    """

    def own(node: Any) -> bool:
        return isinstance(node, InFlight | CompressState)

    return jax.tree.map(
        lambda node: P(axis_name) if own(node) else P(), tree, is_leaf=own
    )

"""Partition specs of a state of which some parts differ between devices."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import PER_DEVICE
from pipejax._internal.mesh import AxisName


def state_specs(tree: Any, axis_name: AxisName = "data") -> Any:
    """Returns the partition specs of a state with gradients in flight or codec states.

    Every device has its own `InFlight` and `CompressState`, whose spec is
    `P(axis_name)`. All other leaves are shared by all devices, with the spec `P()`.

    Args:
      tree: An optimizer state, a Flax `TrainState`, any other pytree, or the result of
        `jax.eval_shape` for one of them.
      axis_name: The axis or axes that were given to `pipelined_mean`.

    Returns:
      A pytree prefix of `tree`, for the `in_specs` and `out_specs` of `shard_map`.

    Examples:
      >>> import jax.numpy as jnp, optax, pipejax as pj
      >>> from jax.sharding import PartitionSpec as P
      >>> state = pj.pipelined(optax.sgd(0.1), "data").init(jnp.zeros(3))
      >>> specs = pj.state_specs(state, "data")
      >>> specs.in_flight == P("data"), specs.calls == P()
      (True, True)
    """

    def own(node: Any) -> bool:
        return isinstance(node, PER_DEVICE)

    return jax.tree.map(
        lambda node: P(axis_name) if own(node) else P(), tree, is_leaf=own
    )

"""Shardings of a state: where each of its arrays lies on the mesh."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.message import InFlight, Message
from pipejax._core.step import Common, inner_state_specs, state_data_specs
from pipejax._internal.mesh import AxisName, auto_mesh, axes
from pipejax._internal.shards import combined_spec, of_all_groups
from pipejax._internal.types import Leaf, Tree

from ._config import StepConfig


def state_shardings(state: Common, mesh: Mesh, axis_name: AxisName) -> Common:
    """Returns the sharding of every array outside of the messages in flight."""
    inner, over_data = inner_state_specs(state), state_data_specs(state, axis_name)
    if over_data.trainable == P():
        every = jax.tree.map(lambda _: P(), state.trainable)
        over_data = over_data._replace(trainable=every)
    return jax.tree.map(
        lambda leaf, *specs: _sharding(leaf, combined_spec(*specs), mesh),
        state,
        inner,
        over_data,
    )


def in_flight_shardings(
    in_flight: InFlight, config: StepConfig, *, whole: bool = False
) -> InFlight:
    """Returns the sharding of every array in flight, without those of codec states.

    `in_flight` is the pipeline of all groups. Every group has its own part or, if it is
    `whole`, the arrays of all. The axes of the mesh have type Auto: JAX has no type for
    an array that is split along one of its axes over mesh axes of both types.
    """
    mesh = auto_mesh(config.mesh)
    every, own = ((), ()) if whole else (axes(config.axis_name), config.message_axes)

    def lying(tree: Tree, specs: tuple[P, ...], data: tuple[str, ...]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        specs = specs or (P(),) * len(leaves)
        pairs = zip(leaves, specs, strict=bool(leaves))
        shardings = [
            _sharding(leaf, of_all_groups(spec, data), mesh) for leaf, spec in pairs
        ]
        return jax.tree.unflatten(structure, shardings)

    def of_message(message: Message) -> Message:
        return message._replace(
            gradients=lying(message.gradients, message.shards.params, own),
            changes=lying(message.changes, message.shards.changes, own),
            passengers=lying(message.passengers, (), own),
        )

    return in_flight._replace(
        pending=tuple(map(of_message, in_flight.pending)),
        filled=lying(in_flight.filled, (), every),
        codec_states={},
    )


def _sharding(leaf: Leaf, spec: P, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec if leaf.size else P())

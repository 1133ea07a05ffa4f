"""Where the pieces of a sharded optimizer lie, as partition specs."""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from pipejax.mesh import AxisName, axes
from pipejax.message import Message, summands
from pipejax.pieces import Devices, Split
from pipejax.shards import (
    Shards,
    cut_spec,
    optimizer_specs,
    shard_form,
    together,
)


class Places(NamedTuple):
    """Where the pieces of parameters and optimizer state lie.

    Attributes:
      devices: The devices that have pieces: those along the axes of the data, and those
        of each group.
      data: Number of devices, or groups, along the axes of the data.
      params: For each parameter, the spec over all axes.
      params_inside: For each parameter, the spec over inner axes.
      opt_state: Pytree like the optimizer state, of specs over all axes.
      opt_state_inside: Pytree like the optimizer state, of specs over inner axes.
      opt_state_cuts: For each leaf of the optimizer state, the axis along which it is
        split over the data, or `None`.
      whole_opt_state: Shapes of the whole optimizer state.
    """

    devices: Devices
    data: int
    params: tuple[P, ...]
    params_inside: tuple[P, ...]
    opt_state: Any
    opt_state_inside: Any
    opt_state_cuts: tuple[int | None, ...]
    whole_opt_state: Any

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        params: Any,
        shards: Shards,
        axis_name: AxisName,
        sizes: Any,
    ) -> "Places":
        """Returns where the pieces lie.

        Args:
          tx: The optimizer.
          params: Shapes of the whole parameters.
          shards: How they are split.
          axis_name: Axis or axes of the data.
          sizes: The sizes of the axes of the mesh, by name.
        """
        names = (*axes(axis_name), *shards.inner)
        devices = Devices({name: sizes[name] for name in names})
        cuts = tuple(cut_spec(cut, axis_name) for cut in shards.cuts)
        inside = shards.params or (P(),) * len(cuts)
        split = tuple(map(together, inside, cuts))
        whole = jax.eval_shape(tx.init, params)
        found = spec_leaves(optimizer_specs(whole, params, cuts))
        return cls(
            devices=devices,
            data=devices.count(axes(axis_name)),
            params=split,
            params_inside=inside,
            opt_state=optimizer_specs(whole, params, split),
            opt_state_inside=optimizer_specs(whole, params, inside),
            opt_state_cuts=tuple(len(x) - 1 if x != P() else None for x in found),
            whole_opt_state=whole,
        )

    def piece(self, form: Any, spec: P) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a device's piece of a whole array."""
        return shard_form(form, spec, self.devices.sizes)


def split_of(spec: P, form: Any) -> Split:
    """Returns a partition spec as a split, which has an entry for every axis.

    Args:
      spec: The spec.
      form: The array, or its shape.
    """
    entries = [() if entry is None else axes(entry) for entry in spec]
    return (*entries, *[()] * (len(form.shape) - len(entries)))


def spec_leaves(tree: Any) -> list[P]:
    """Returns the partition specs of a pytree."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, P))


def exact_specs(message: Message) -> tuple[P, ...]:
    """Returns how the arrays that travel exactly are split over inner axes.

    Args:
      message: A message, or its shapes.
    """
    changes = len(jax.tree.leaves(message.changes))
    others = len(summands(message).exact) - changes
    return (*(message.shards.changes or (P(),) * changes), *(P(),) * others)

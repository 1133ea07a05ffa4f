"""Where the pieces of a sharded optimizer lie, as partition specs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, summands
from pipejax._core.partitioned import Devices, Split
from pipejax._internal.mesh import AxisName, axes
from pipejax._internal.shards import (
    Shards,
    combined_spec,
    data_spec,
    optimizer_specs,
    over,
    shard_form,
)
from pipejax._internal.types import Tree

from ._state import Trainable, specs_over
from ._step import Settings


class Partition(NamedTuple):
    """Where the pieces of parameters and optimizer state lie.

    Attributes:
      devices: The devices that have pieces: those along the axes of the data, and those
        of each group.
      data: Number of devices, or groups, along the axes of the data.
      params: For each parameter, the spec over all axes.
      params_inner: For each parameter, the spec over inner axes.
      opt_state: Pytree like the optimizer state, of specs over all axes.
      opt_state_inner: Pytree like the optimizer state, of specs over inner axes.
      opt_state_axes: For each leaf of the optimizer state, the axis along which it is
        split over the data, or `None`.
    """

    devices: Devices
    data: int
    params: tuple[P, ...]
    params_inner: tuple[P, ...]
    opt_state: optax.OptState
    opt_state_inner: Any
    opt_state_axes: tuple[int | None, ...]
    whole_opt_state: optax.OptState

    @classmethod
    def of(
        cls, settings: Settings, trainable: Trainable, sizes: Any = None
    ) -> "Partition":
        """Returns where the pieces lie.

        If the shards do not say how the optimizer state is split, an array at the path
        of a parameter of the same shape is split as this parameter, and all others are
        whole. `sizes` are those of the axes of the mesh, by name, and by default of the
        mesh of the surrounding program.
        """
        shards, own = trainable.shards, axes(settings.axis_name)
        names = (*own, *shards.inner)
        sizes = sizes or jax.sharding.get_abstract_mesh().shape
        devices = Devices({name: sizes[name] for name in names})
        split, inner = param_specs(shards, settings.axis_name)
        params = trainable.whole_params
        whole = jax.eval_shape(settings.tx.init, params)
        # The first guess is by path and shape. `zero1_step` plans the update to find
        # the rest.
        specs = shards.opt_state or spec_leaves(optimizer_specs(whole, params, split))
        data = (over(spec, own) for spec in specs)
        return cls(
            devices=devices,
            data=devices.count(own),
            params=split,
            params_inner=inner,
            opt_state=specs_over(specs, whole, names),
            opt_state_inner=specs_over(specs, whole, shards.inner),
            opt_state_axes=tuple(len(x) - 1 if x != P() else None for x in data),
            whole_opt_state=whole,
        )

    def piece(self, form: Any, spec: P) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a device's piece of a whole array."""
        return shard_form(form, spec, self.devices.sizes)

    def kept(self, spec: P, split: Split) -> P:
        """Returns the spec of a result in the place of an array with the spec `spec`.

        It is `spec` unless pieces of the result lie elsewhere.
        """
        same = self.devices.divides(split_of(spec, len(split))) == split
        return spec if same else spec_of(split)


def param_specs(
    shards: Shards, axis_name: AxisName
) -> tuple[tuple[P, ...], tuple[P, ...]]:
    """Returns how parameters or gradients are split, over all axes and inner ones."""
    over_data = (data_spec(axis, axis_name) for axis in shards.data_axes)
    inner = shards.params or (P(),) * len(shards.data_axes)
    return tuple(map(combined_spec, inner, over_data)), inner


def check_partition(after: Sequence[P], partition: Partition) -> None:
    """Raises a `ValueError` unless an update leaves the optimizer state as it lies."""
    leaves = jax.tree_util.tree_leaves_with_path(partition.whole_opt_state)
    triples = zip(leaves, spec_leaves(partition.opt_state), after, strict=True)
    for (path, _), before, now in triples:
        if before != now:
            raise ValueError(
                "`state` must be of a train step with this `tx`, which decides how the"
                " arrays of its state are split with shard_optimizer=True; got"
                f" `opt_state{jax.tree_util.keystr(path)}` split as {before}, and an"
                f" update that leaves it as {now}. Drain it with the train step that"
                " made it, then go on from `train.init(state.params,"
                " opt_state=state.opt_state)`."
            )


def spec_of(split: Split) -> P:
    """Undoes `split_of`: returns a split as a partition spec."""
    return over(P(*split), {name for names in split for name in names})


def split_of(spec: P, ndim: int) -> Split:
    """Returns a partition spec as a split, which has an entry for every axis."""
    entries = [() if entry is None else axes(entry) for entry in spec]
    return (*entries, *[()] * (ndim - len(entries)))


def spec_leaves(tree: Tree) -> list[P]:
    """Returns the partition specs of a pytree."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, P))


def exact_specs(message: Message) -> tuple[P, ...]:
    """Returns how the arrays that travel exactly are split over inner axes."""
    changes = len(jax.tree.leaves(message.changes))
    others = len(summands(message).exact) - changes
    return (*(message.shards.changes or (P(),) * changes), *(P(),) * others)

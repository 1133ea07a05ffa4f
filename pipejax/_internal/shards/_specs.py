"""The partition specs of a state's arrays, and how specs are combined."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pipejax._internal.mesh import AxisName, axes
from pipejax._internal.structures import like_optimizer


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shards:
    """Partition specs of the arrays of a state, over inner axes.

    It is a pytree without leaves, so that a traced function can be given it.

    Attributes:
      changes: A spec for each change of model state in a message. Empty in a state.
      data_axes: The axis along which each parameter is split over the data, or `None`.
        Empty without a sharded optimizer.
      inner: Names of the inner axes.
    """

    params: tuple[P, ...] = ()
    model_state: tuple[P, ...] = ()
    changes: tuple[P, ...] = ()
    data_axes: tuple[int | None, ...] = ()
    inner: tuple[str, ...] = ()
    opt_state: tuple[P, ...] = ()

    def __bool__(self) -> bool:
        """Returns whether there are specs, as on every mesh with inner axes."""
        return bool(self.params)


UNSHARDED = Shards()


def axes_along(entry: Any) -> tuple[str, ...]:
    """Returns the axes over which a spec splits one axis of an array."""
    return () if entry is None else axes(entry)


def split_axes(spec: P, sizes: Any) -> frozenset[str]:
    """Returns the axes of more than one device over which a spec splits an array."""
    return frozenset(n for entry in spec for n in axes_along(entry) if sizes[n] > 1)


def copies_of(spec: P, sizes: Mapping[str, int]) -> int:
    """Returns how many devices of a group hold the same shard of an array."""
    return math.prod(
        n for name, n in sizes.items() if name not in split_axes(spec, sizes)
    )


def shard_form(form: Any, spec: P, sizes: Any) -> jax.ShapeDtypeStruct:
    parts = [math.prod(sizes[name] for name in axes_along(entry)) for entry in spec]
    parts += [1] * (len(form.shape) - len(parts))
    shape = tuple(n // k for n, k in zip(form.shape, parts, strict=True))
    return jax.ShapeDtypeStruct(shape, form.dtype)


def optimizer_specs(opt_state: Any, params: Any, specs: tuple[P, ...]) -> Any:
    """Returns the specs of an optimizer's state, whose arrays are like parameters."""
    return like_optimizer(opt_state, params, specs, P())


def data_axes_of(
    params: Any, specs: tuple[P, ...], devices: int, sizes: Any
) -> tuple[int | None, ...]:
    """Returns the axis along which each parameter is split with a sharded optimizer.

    It is the first axis that divides among the devices and is not split inside a group.
    """

    def cut(leaf: Any, spec: P) -> int | None:
        inner = {i for i, entry in enumerate(spec) if split_axes(P(entry), sizes)}
        axes = (
            axis
            for axis, length in enumerate(leaf.shape)
            if axis not in inner and length % devices == 0
        )
        return next(axes, None) if math.prod(leaf.shape) else None

    leaves = jax.tree.leaves(params)
    return tuple(map(cut, leaves, specs))


def data_spec(cut: int | None, axis_name: AxisName) -> P:
    """Returns the spec of an array that is split over the data along the axis `cut`."""
    return P() if cut is None else P(*[None] * cut, axis_name)


def combined_spec(inner: P, over_data: P) -> P:
    """Returns the spec of an array that is split inside groups and over the data.

    Examples:
      >>> combined_spec(P(None, "fsdp"), P("host")) == P("host", "fsdp")
      True
    """
    pairs = itertools.zip_longest(inner, over_data)
    return P(*(_entry((*axes_along(b), *axes_along(a))) for a, b in pairs))


def over(spec: P, names: Collection[str]) -> P:
    """Returns the part of a spec over some axes, without entries that follow the last.

    Examples:
      >>> over(P("fsdp", "host"), {"host"}) == P(None, "host")
      True
      >>> over(P("fsdp", "host"), {"fsdp"}) == P("fsdp")
      True
    """
    found = [tuple(n for n in axes_along(entry) if n in names) for entry in spec]
    while found and not found[-1]:
        found.pop()
    return P(*map(_entry, found))


def of_all_groups(spec: P, axis_name: AxisName) -> P:
    """Returns the spec of arrays that differ between groups, over all axes of a mesh.

    The arrays of all groups are concatenated along their first axis.

    Examples:
      >>> of_all_groups(P(None, "tp"), "host") == P("host", "tp")
      True
      >>> of_all_groups(P("fsdp"), "host") == P(("host", "fsdp"))
      True
    """
    return combined_spec(spec, P(axis_name))


def _entry(names: tuple[str, ...]) -> Any:
    """Undoes `axes_along`."""
    return names[0] if len(names) == 1 else names or None

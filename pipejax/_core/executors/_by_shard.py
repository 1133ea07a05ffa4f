"""Sums the messages of a sharded model on CPUs, beside the compute of its groups."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from pipejax._core.message import (
    Mark,
    Message,
    Reduced,
    Valid,
    check_alike,
    on_shards_of,
)
from pipejax._internal.mesh import (
    AxisName,
    axes,
    inner_axes,
    on_mesh,
    processes_of_groups,
    size_along,
)
from pipejax._internal.shards import UNSHARDED, copies_of
from pipejax._internal.types import CodecStates, Tree
from pipejax.collectives import Grouped

from ._config import StepConfig


def exchange_by_shard(
    config: StepConfig,
) -> Callable[..., tuple[Reduced, CodecStates]]:
    """Returns a function that sums the shards at each place in a group by themselves.

    XLA's CPU client runs a program on several devices of a process only when all
    earlier ones have ended. The compute of a sharded model is such a program, and would
    wait for the reduction. The reduction therefore runs as one program for each place
    in a group, each on a single device of every process. Every device does what it
    does in `exchange_on_mesh`, so the bits are the same.
    """
    mesh, axis = config.mesh, config.axis_name
    meshes, messages = _by_shard(mesh, axis), config.message_spec
    own: Any = P(axis)
    inner = {name: mesh.shape[name] for name in inner_axes(mesh, axis)}
    placed = [placed_once(place) for place in meshes]

    @functools.cache
    def programs(sets: tuple[tuple[int, ...], ...]) -> list[Any]:
        grouped = dataclasses.replace(config, all_reduce=Grouped(config.sums_by, sets))

        def local(
            message: Message, before: CodecStates, valid: Valid, mark: Mark
        ) -> tuple[Reduced, CodecStates]:
            return grouped.exchange(None, message, valid, mark).run(before)

        whole: Any = P()
        reduced = Reduced(whole, whole, whole, whole, whole, own)
        specs = (messages, own, whole, whole), (reduced, own)
        mapped = (on_mesh(local, place, *specs) for place in meshes)
        return [jax.jit(each) for each in mapped]

    def exchange(
        trained: None,
        message: Message,
        states: CodecStates,
        valid: Valid,
        mark: Mark = None,
    ) -> tuple[Reduced, CodecStates]:
        del trained
        sharded = on_shards_of(message, config.sums_by)
        unsharded = message._replace(shards=UNSHARDED)
        calls = zip(programs(sharded.sets(mesh.shape)), meshes, placed, strict=True)
        # A call returns before its sum is there.
        done = [
            program(
                _on_place(unsharded, place, messages),
                _on_place(states, place, own),
                *on_place((valid, mark)),
            )
            for program, place, on_place in calls
        ]
        totals, after = zip(*jax.block_until_ready(done), strict=True)
        for total in totals:
            check_alike(total.alike)
        shards = message.shards
        sums = [
            x._replace(sum=x.sum._replace(shards=shards), alike=None) for x in totals
        ]
        total = _together(sums, mesh, inner)
        # All devices of a group keep their codec states, or none of them does.
        usable = all(bool(x.usable.addressable_data(0)) for x in totals)
        if not usable:
            return total, states
        return total, jax.tree.map(_put_together, states, *after)

    return exchange


def placed_once(mesh: Mesh) -> Callable[[Any], Any]:
    """Returns a function that places the numbers of a pytree, without a collective.

    Each value is placed once. An argument of a program would be copied to the devices
    in every step, which a transfer guard forbids.
    """
    placed = functools.cache(functools.partial(_number, NamedSharding(mesh, P())))
    return lambda numbers: jax.tree.map(placed, numbers)


def _number(sharding: Sharding, value: Any) -> jax.Array:
    devices = sharding.addressable_devices
    parts = [jax.device_put(value, device) for device in devices]
    return jax.make_array_from_single_device_arrays(np.shape(value), sharding, parts)


def groups_in_processes(mesh: Mesh, axis_name: AxisName) -> bool:
    """Returns whether every process has a whole group of several CPU devices."""
    if not mesh.is_multi_process or not inner_axes(mesh, axis_name):
        return False
    return all(len(x) == 1 for x in processes_of_groups(mesh, axis_name))


def _by_shard(mesh: Mesh, axis_name: AxisName) -> list[Mesh]:
    """Returns a mesh of the devices at each place in a group, one of each group."""
    data = [mesh.axis_names.index(name) for name in axes(axis_name)]
    rows = np.moveaxis(mesh.devices, data, range(len(data)))
    columns = rows.reshape(*rows.shape[: len(data)], -1)
    return [Mesh(columns[..., i], axes(axis_name)) for i in range(columns.shape[-1])]


def _on_place(tree: Tree, place: Mesh, spec: P) -> Any:
    """Returns the parts of arrays on the devices of `place`, as arrays of their own."""

    def one(array: jax.Array) -> jax.Array:
        parts = {x.device: x.data for x in array.addressable_shards}
        here = [parts[device] for device in place.local_devices]
        sharding = NamedSharding(place, spec)
        shape = (size_along(place, spec[0]) * here[0].shape[0], *here[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, here)

    return jax.tree.map(one, tree)


def _together(totals: list[Reduced], mesh: Mesh, inner: Mapping[str, int]) -> Reduced:
    """Returns the sums of all places as one, which is finite if all of them are."""
    first = totals[0]

    copies = [copies_of(spec, inner) for spec in first.sum.shards.params]
    found = [np.asarray(x.squares.addressable_data(0)) for x in totals]
    squares = (sum(found) / np.array(copies)).astype(np.float32)

    def put(spec: P, *parts: jax.Array) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        sizes = [math.prod(mesh.shape[x] for x in axes(e or ())) for e in spec]
        sizes += [1] * (parts[0].ndim - len(sizes))
        shape = tuple(n * k for n, k in zip(parts[0].shape, sizes, strict=True))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    finite = all(bool(x.finite.addressable_data(0)) for x in totals)
    same = [
        x._replace(
            finite=_number(x.finite.sharding, finite),
            squares=_number(x.squares.sharding, squares),
        )
        for x in totals
    ]
    return jax.tree.map(put, sum_specs(first), *same)


def _put_together(like: jax.Array, *parts: jax.Array) -> jax.Array:
    """Undoes `_on_place` on codec states, which have the form of those before."""
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def sum_specs(total: Reduced) -> Reduced:
    """Returns the partition spec of every array of a sum over inner axes."""
    shards, whole = total.sum.shards, jax.tree.map(lambda _: P(), total)
    if not shards:
        return whole
    form = total.sum
    gradients, changes = map(jax.tree.structure, (form.gradients, form.changes))
    specs = whole.sum._replace(
        gradients=jax.tree.unflatten(gradients, shards.params),
        changes=jax.tree.unflatten(changes, shards.changes),
    )
    return whole._replace(sum=specs)

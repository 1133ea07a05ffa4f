"""Reads which devices exchange data in a collective, in every form that XLA writes.

A collective writes its groups in one of these forms:

- `{{0,1},{2,3}}`: a list of groups. `{}` stands for one group of all numbers.
- `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`: an array of the numbers from 0 on, which has the
  shape on the right, is transposed by `T`, and is then reshaped to the shape on the
  left. Each row of the result is a group.
- `mesh['x'=4,'y'=2] {'x'}`: a group along the axes in braces, for each position on the
  other axes. The mesh contains the numbers from 0 on, in order. Another order follows
  the mesh: `, device_ids=([2,4]T(1,0))` or `, device_ids=(3,1,0,2)`. `'x':(2)2` is a
  part of axis x, which has size 2 and comes after a part of size 2.
- `source_target_pairs={{0,1},{1,0}}`: pairs of a sender and a receiver. Devices that
  pairs connect, directly or through other devices, form a group.

Other attributes decide what a number stands for:

- With `use_global_device_ids=true`, a number is a device.
- With a `channel_id`, a number in an all-reduce, all-gather, reduce-scatter or
  collective-reduce is a replica, and stands for all partitions of the replica.
- With a `channel_id`, a number in any other collective is a partition, and each replica
  has these groups.
- Without a `channel_id`, a number is a replica, and each partition has these groups.
- An attribute `mode` names one of these four cases and takes precedence.

A partition of a replica runs on device `replica * num_partitions + partition`.
"""

import itertools
import math
import re
from collections.abc import Iterable

import numpy as np

from ._module import Instruction, Module, not_understood

Group = frozenset[int]

_INTS = r"\d+(?:,\d+)*"
_IOTA = rf"\[({_INTS})\](?:T\(({_INTS})\))?"
_NAME = r"'(?:\\.|[^'\\])*'"
_AXIS, _PART = rf"({_NAME})=(\d+)", rf"({_NAME})(?::\((\d+)\)(\d+))?"
_MESH = re.compile(
    rf"mesh\[(?P<axes>{_AXIS}(?:,{_AXIS})*)\]"
    rf"(?:, device_ids=\((?P<ids>{_IOTA}|{_INTS})\))?"
    rf" \{{(?P<along>(?:{_PART}(?:,{_PART})*)?)\}}"
)
_REDUCTIONS = ("all-reduce", "all-gather", "reduce-scatter", "collective-reduce")


def groups_of(collective: Instruction, module: Module) -> tuple[Group, ...]:
    """Returns the sets of devices that exchange data, as numbers in the program."""
    count = module.replica_count * module.num_partitions
    why = f"its groups have an unknown form or do not fit its {count} devices"
    try:
        found = _by_device(collective, _written(collective), module)
    except (ValueError, IndexError, KeyError) as error:
        raise not_understood(collective.line, why) from error
    # Groups that overlap, or have unknown devices, were read in a wrong mode.
    members = [device for group in found for device in group]
    if len(members) != len(set(members)) or not set(members) <= set(range(count)):
        raise not_understood(collective.line, why)
    return found


def _written(op: Instruction) -> list[Group]:
    """Returns the groups as written. Without any, all devices are one group."""
    pairs = op.attributes.get("source_target_pairs") or op.frontend.get(
        "_xla_send_recv_source_target_pairs"
    )
    if pairs is not None:
        # A ring of pairs is one group, because data can reach each of its devices.
        return connected(_listed(pairs)) or [frozenset()]
    text = op.attribute("replica_groups")
    if text.startswith("mesh["):
        return _along_mesh(text)
    if iota := re.fullmatch(rf"\[(\d+),(\d+)\]<={_IOTA}", text):
        shape = int(iota[1]), int(iota[2])
        return _rows(_iota(iota[3], iota[4]).reshape(shape))
    return _listed(text)


def _listed(text: str) -> list[Group]:
    if not re.fullmatch(rf"\{{(\{{{_INTS}\}}(, ?\{{{_INTS}\}})*)?\}}", text):
        raise ValueError(text)
    return [frozenset(map(int, x.split(","))) for x in re.findall(_INTS, text)]


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = [int(n) for n in dims.split(",")]
    array = np.arange(math.prod(shape)).reshape(shape)
    return array.transpose([int(n) for n in order.split(",")]) if order else array


def _rows(array: np.ndarray) -> list[Group]:
    return [frozenset(map(int, row)) for row in array]


def _along_mesh(text: str) -> list[Group]:
    mesh = _MESH.fullmatch(text)
    if not mesh:
        raise ValueError(text)
    sizes = {name: int(size) for name, size in re.findall(_AXIS, mesh["axes"])}
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, before, size in re.findall(_PART, mesh["along"]):
        if name not in sizes:
            raise ValueError(name)
        # A part is kept as the range of sizes that it covers: `'x':(2)2` comes after a
        # part of size 2, and so covers the sizes from 2 to 4.
        begin = int(before or 1)
        parts[name].append((begin, begin * int(size or sizes[name])))
    # Split each axis into dimensions at the places where a part of it begins or ends.
    dims: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        # Between two cuts, an axis has a dimension of size high / low. For an axis of
        # size 8 and the part (2, 4), the dimensions are 2, 2 and 2, of which the second
        # is in the group.
        cuts = sorted({1, size, *itertools.chain.from_iterable(parts[name])})
        for low, high in itertools.pairwise(cuts):
            if any(begin <= low and high <= end for begin, end in parts[name]):
                grouped.append(len(dims))
            dims.append(high // low)
    cut = _mesh_devices(mesh["ids"], list(sizes.values())).reshape(dims)
    # With the grouped dimensions last, each row of the reshaped array is a group.
    last = range(len(dims) - len(grouped), len(dims))
    width = math.prod(dims[i] for i in grouped)
    return _rows(np.moveaxis(cut, grouped, last).reshape(-1, width))


def _mesh_devices(ids: str | None, shape: list[int]) -> np.ndarray:
    if ids is None:
        return np.arange(math.prod(shape))
    if iota := re.fullmatch(_IOTA, ids):
        return _iota(iota[1], iota[2])
    return np.array([int(n) for n in ids.split(",")])


def connected(pairs: Iterable[Group]) -> list[Group]:
    """Merges pairs that share a device into disjoint sets.

    Examples:
      >>> connected([frozenset({0, 1}), frozenset({2, 3}), frozenset({1, 4})])
      [frozenset({2, 3}), frozenset({0, 1, 4})]
    """
    found: list[Group] = []
    for pair in pairs:
        # A pair may join several groups that had no device in common so far.
        connected_sets = [group for group in found if group & pair]
        found = [group for group in found if not group & pair]
        found.append(pair.union(*connected_sets))
    return found


def _by_device(
    op: Instruction, written: list[Group], module: Module
) -> tuple[Group, ...]:
    ids = np.arange(module.replica_count * module.num_partitions)
    grid = ids.reshape(module.replica_count, module.num_partitions)
    # Every list has the device, or the devices, that each number of a group stands for.
    # The groups are repeated for each of the lists.
    lists = {
        "flattened_id": ids[None],
        "cross_replica_and_partition": grid[None],
        "cross_partition": grid,
        "cross_replica": grid.T,
    }[_mode(op)]
    return tuple(
        frozenset(devices[sorted(group)].flatten().tolist())
        for devices in lists
        for group in written or [frozenset(range(len(devices)))]
    )


def _mode(op: Instruction) -> str:
    """Returns XLA's name for what the numbers in the groups of `op` stand for."""
    if "mode" in op.attributes:
        return op.attributes["mode"]
    if op.attributes.get("use_global_device_ids") == "true":
        return "flattened_id"
    if "channel_id" not in op.attributes:
        return "cross_replica"
    reduces = op.opcode.removesuffix("-start") in _REDUCTIONS
    return "cross_replica_and_partition" if reduces else "cross_partition"

"""
Reads collectives from a compiled program without the inspector.

Only the lines of collectives are read, each by one regular expression. The opcode gives
the kind, and the result gives the size.
"""

import collections
import itertools
import math
import re

import numpy as np

LINE = re.compile(
    r" = (?P<result>.*?) (?P<opcode>(?P<kind>(ragged-)?all-to-all|all-reduce|all-gather"
    r"|reduce-scatter|collective-permute|collective-broadcast|send|recv)(-start)?)\("
)
BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
KINDS_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
BYTES = {"pred": 1, "u8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}


def begins(line):
    """Returns whether a line begins a collective, and does not continue a fusion."""
    flag = re.search(r'"flag_start":"(-?\d+)"', line)
    return flag is None or flag[1] == "-1"


def kind_of(line):
    """Returns the kind of collective in a line, or that of the first of two halves."""
    found, between = LINE.search(line), BETWEEN_SLICES.search(line)
    if found and between:
        first = found["kind"] == "send"
        return KINDS_BETWEEN_SLICES[between[1]] if first else None
    return found["kind"] if found else None


def handed_over(line, size):
    """Returns the bytes that a device contributes, from the result and group size."""
    found = LINE.search(line)
    text, kind = found["result"], found["kind"]
    if kind in ("send", "recv"):
        return in_bytes(text.split(", u32[]")[0])
    # A start returns its operands first. An older all-reduce returns only its results.
    only_results = kind == "all-reduce" and not text.startswith("((")
    if found["opcode"].endswith("-start") and text.startswith("(") and not only_results:
        text = second(text)
    factor = {"all-gather": 1 / size, "reduce-scatter": size}.get(kind, 1)
    return in_bytes(text) * factor


def in_bytes(text):
    """Returns the bytes of all arrays in a shape."""
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", re.sub(r"\{[^{}]*\}", "", text))
    return sum(
        BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in arrays
    )


def second(text):
    """Returns the second element of a tuple."""
    depth, ends = 0, []
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            ends.append(at)
    return text[ends[0] + 1 : ends[1]]


def pairs_of(line, mesh):
    """Returns the pairs (sender, receiver) of a permute, of all or of each slice."""
    if across := re.findall(r"\{(\d+)->(\d+)\}", line):
        by_id = {str(device.id): device for device in mesh.devices.flat}
        return [(by_id[a], by_id[b]) for a, b in across]
    listed = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)[1]
    devices = mesh.devices.ravel()
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return [
        tuple(one[int(i)] for i in pair)
        for pair in re.findall(r"\{(\d+),(\d+)\}", listed)
        for one in np.split(devices, slices)
    ]


def reached(pairs, mesh):
    """Returns the sets of devices that pairs connect, in either direction."""
    devices = list(mesh.devices.flat)
    near = np.eye(len(devices), dtype=bool)
    for a, b in pairs:
        near[devices.index(a), devices.index(b)] = True
    near = near | near.T
    for _ in devices:
        near = near @ near
    involved = {device for pair in pairs for device in pair}
    return frozenset(
        frozenset(d for d, there in zip(devices, row, strict=True) if there)
        for device, row in zip(devices, near, strict=True)
        if device in involved
    )


def lines_of(mesh):
    """Returns the axes by the groups of devices along them, for every set of axes.

    Parts of axes, into which XLA may cut an axis, are included, such as `part of
    device`.
    """
    cuts = [(name, n) for name, size in mesh.shape.items() for n in factors(size)]
    whole = dict(collections.Counter(name for name, _ in cuts))
    grid = mesh.devices.reshape([n for _, n in cuts])
    found = {}
    for count in range(len(cuts) + 1):
        for axes in itertools.combinations(range(len(cuts)), count):
            last = np.moveaxis(grid, axes, range(-count, 0))
            size = math.prod(cuts[i][1] for i in axes)
            parts = collections.Counter(cuts[i][0] for i in axes)
            names = tuple(
                name if parts[name] == whole[name] else f"part of {name}"
                for name in mesh.axis_names
                if parts[name]
            )
            found[frozenset(map(frozenset, last.reshape(-1, size)))] = names
    return found


def factors(n):
    """Returns the prime factors of n."""
    for divisor in range(2, n + 1):
        if n % divisor == 0:
            return [divisor, *factors(n // divisor)]
    return []

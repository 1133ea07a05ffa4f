"""What can be known of a compiled program without the inspector.

Of its text only the lines of collectives are read, each by one regular expression: its
kind by the opcode, its size by the result.
"""

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
    """Whether it is not part of a fusion that goes on with what another one began."""
    flag = re.search(r'"flag_start":"(-?\d+)"', line)
    return flag is None or flag[1] == "-1"


def kind_of(line):
    """The kind of collective in a line, if there is one; of two halves, the first."""
    found, between = LINE.search(line), BETWEEN_SLICES.search(line)
    if found and between:
        first = found["kind"] == "send"
        return KINDS_BETWEEN_SLICES[between[1]] if first else None
    return found["kind"] if found else None


def handed_over(line, size):
    """Bytes of a device in a group of `size`, by the result of the collective."""
    found = LINE.search(line)
    text, kind = found["result"], found["kind"]
    if kind in ("send", "recv"):
        return in_bytes(text.split(", u32[]")[0])
    # A start returns its operands first; an older all-reduce its results alone.
    only_results = kind == "all-reduce" and not text.startswith("((")
    if found["opcode"].endswith("-start") and text.startswith("(") and not only_results:
        text = second(text)
    factor = {"all-gather": 1 / size, "reduce-scatter": size}.get(kind, 1)
    return in_bytes(text) * factor


def in_bytes(text):
    """Of all arrays in a shape."""
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", re.sub(r"\{[^{}]*\}", "", text))
    return sum(
        BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in arrays
    )


def second(text):
    """The second element of a tuple."""
    depth, ends = 0, []
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            ends.append(at)
    return text[ends[0] + 1 : ends[1]]


def lines_of(mesh):
    """Axes by the groups of devices along them, for every set of axes."""
    found = {}
    for count in range(len(mesh.axis_names) + 1):
        for axes in itertools.combinations(range(len(mesh.axis_names)), count):
            moved = np.moveaxis(mesh.devices, axes, range(-count, 0))
            size = math.prod(mesh.devices.shape[i] for i in axes)
            groups = frozenset(map(frozenset, moved.reshape(-1, size)))
            found[groups] = tuple(mesh.axis_names[i] for i in axes)
    return found

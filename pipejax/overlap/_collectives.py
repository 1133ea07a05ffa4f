"""Instructions by which devices exchange data: of what kind, between whom, how much."""

from . import _slices
from ._groups import groups_of
from ._hlo import Computation, Instruction, Module, Shape

# As opcodes; `opcode-start` and `opcode-done` where it is asynchronous.
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "collective-reduce",
    "send",
    "recv",
)


def is_collective(op: Instruction) -> bool:
    """Whether `op` is a collective, or the start of one, between devices.

    Of an exchange between slices that is its `send`. A transfer to the host is none.
    """
    if op.opcode.removesuffix("-start") not in COLLECTIVES:
        if {"replica_groups", "source_target_pairs"} & op.attributes.keys():
            op.refuse("a collective of an unknown kind")
        return False
    if _slices.between_slices(op):
        return op.opcode == "send"
    return op.attributes.get("is_host_transfer") != "true"


def kind_of(op: Instruction) -> str:
    """One of `COLLECTIVES`."""
    if _slices.between_slices(op):
        return _slices.kind(op)
    return op.opcode.removesuffix("-start")


def group_size(op: Instruction, module: Module) -> int:
    """Devices in the largest group."""
    across = _slices.between_slices(op)
    groups = _slices.groups_by_id(op) if across else groups_of(op, module)
    return max(map(len, groups), default=0)


def handed_over(op: Instruction, home: Computation) -> list[Shape]:
    """Arrays that a device contributes; what it receives, for a `recv`."""
    if op.opcode == "recv":
        return list(op.shapes[:1])
    operands, kind = op.operands, kind_of(op)
    if kind == "collective-permute" and "slice_sizes" in op.attributes:
        op.refuse("a permute of slices in place, whose bytes are not in its operands")
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # The others say where to, and how much.
    elif op.attributes.get("has_dynamic_root") == "true":
        operands = operands[:-1]  # The last one says who is the root.
    return [shape for shape in home.shapes_of(operands) if shape.bytes]

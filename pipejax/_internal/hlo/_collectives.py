"""Recognizes the instructions that are collectives, and reads their kind and size."""

from . import _slices
from ._groups import groups_of
from ._module import Computation, Instruction, Module, Shape

# Opcodes of synchronous collectives. An asynchronous collective has two instructions,
# `opcode-start` and `opcode-done`.
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
    """Returns whether `op` is a collective between devices, or the start of one."""
    if op.opcode.removesuffix("-start") not in COLLECTIVES:
        if {"replica_groups", "source_target_pairs"} & op.attributes.keys():
            op.refuse("it is a collective of an unknown kind")
        return False
    if _slices.between_slices(op):
        # A collective between slices has two instructions, of which one is to count.
        return op.opcode == "send"
    return op.attributes.get("is_host_transfer") != "true"


def kind_of(op: Instruction) -> str:
    if _slices.between_slices(op):
        return _slices.kind(op)
    return op.opcode.removesuffix("-start")


def group_size(op: Instruction, module: Module) -> int:
    across = _slices.between_slices(op)
    groups = _slices.groups_by_id(op) if across else groups_of(op, module)
    return max(map(len, groups), default=0)


def handed_over(op: Instruction, home: Computation) -> list[Shape]:
    """Returns the shapes that a device contributes, or that a `recv` receives."""
    if op.opcode == "recv":
        return list(op.shapes[:1])
    operands, kind = op.operands, kind_of(op)
    if kind == "collective-permute" and "slice_sizes" in op.attributes:
        op.refuse("it permutes slices in place, whose size its operands do not show")
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # The others are offsets and sizes.
    elif op.attributes.get("has_dynamic_root") == "true":
        operands = operands[:-1]  # The last operand is the root.
    return [shape for shape in home.shapes_of(operands) if shape.bytes]

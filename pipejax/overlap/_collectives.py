"""Instructions by which devices exchange data: of what kind, between whom, how much."""

from pipejax.collectives._wire import wire_bytes

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


def group_size(op: Instruction, module: Module) -> int | None:
    """Devices in the largest group; `None` if the text does not say who takes part."""
    if _slices.between_slices(op):
        target = _slices.target(op)
        return len(target.slices) if target else None
    if op.opcode in ("send", "recv") and not has_pairs(op):
        return None
    return max(map(len, groups_of(op, module)), default=0)


def has_pairs(op: Instruction) -> bool:
    """Whether a `send` or `recv` says who sends to whom."""
    return "_xla_send_recv_source_target_pairs" in op.frontend


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


def sent(op: Instruction, devices: int | None, payload: float) -> float | None:
    """Bytes that a device must send at best; `None` if who takes part matters."""
    kind = kind_of(op)
    if devices is not None:
        return wire_bytes(kind, devices, payload)
    if kind in ("collective-permute", "send", "recv"):
        return wire_bytes(kind, 2, payload)
    return None

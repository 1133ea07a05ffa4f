"""Counts the work in a compiled program: the FLOPs of its matmuls and convolutions.

`_matmuls` counts the FLOPs of one instruction, and `_trips` how often a loop runs. A
conditional counts as its largest branch. The FLOPs of a custom call are counted if it
is a known call of cuBLAS or cuDNN. Any other custom call is listed as not counted,
unless it is known to contain no matmul.
"""

import dataclasses
import re

from ._collectives import COLLECTIVES
from ._matmuls import DOTS, flops_of
from ._module import Computation, Instruction, Module, not_understood
from ._trips import trip_count

# Instructions that run no kernel: they name memory, wait, or communicate.
_FREE = {
    *COLLECTIVES,
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "AllocateBuffer",
    "ConcatBitcast",
    "PrepareAsyncCallDone",
    "PrepareAsyncCallStart",
}
_MATMULS = {*DOTS, "convolution", "custom-call"}
# Custom calls without matmuls. Any other custom call may contain one, or communicate.
_HARMLESS = re.compile(
    r"__cub\$.*|.*TopK|AllocateBuffer|ConcatBitcast|AsyncCollective(Start|Done)"
    r"|PrepareAsyncCall(Start|Done)|SliceId|ZeroCrop|PadToStatic|SliceToDynamic"
    r"|AssumeGatherIndicesInBound|GatherScatterIndicesBitpacked|Sharding"
    r"|SPMDFullToShardShape|SPMDShardToFullShape|MoveTo(Host|Device)|X64(Split|Combine).*"
    r"|annotate_device_placement|LayoutConstraint|LocalSort|xla_.*python_.*callback"
)


@dataclasses.dataclass(frozen=True, order=True)
class WorkCount:
    flops: float = 0.0  # of matmuls and convolutions
    matmuls: int = 0
    operations: int = 0  # kernels; a fusion is one, whatever it contains

    def __add__(self, other: "WorkCount") -> "WorkCount":
        return WorkCount(
            self.flops + other.flops,
            self.matmuls + other.matmuls,
            self.operations + other.operations,
        )

    def times(self, count: int) -> "WorkCount":
        return WorkCount(
            count * self.flops, count * self.matmuls, count * self.operations
        )


class Counter:
    def __init__(self, module: Module):
        self.module = module
        # Why the FLOPs of an instruction are not counted in full, by its name.
        self.uncounted: dict[str, str] = {}
        self._known: dict[str, WorkCount] = {}

    def of(self, op: Instruction, home: Computation) -> WorkCount:
        if op.opcode == "while":
            parts = [self.whole(name) for name in op.calls]
            return sum(parts, WorkCount()).times(self.trips(op, home))
        if op.opcode == "conditional":
            return max(map(self.whole, op.calls), default=WorkCount())
        if op.opcode == "call":
            return sum(map(self.whole, op.calls), WorkCount())
        if op.opcode.endswith(("-done", "-update")):
            return WorkCount()
        if op.opcode in _MATMULS:
            flops = self._matmul(op, home)
            return WorkCount(flops, int(flops > 0), int(op.target not in _FREE))
        if op.opcode == "custom-call-start":
            self._note(op)
        # Instructions inside a fusion or an asynchronous start are not kernels.
        inner = sum(map(self.whole, op.calls), WorkCount())
        if inner.matmuls and not op.opcode.endswith(("fusion", "-start")):
            self.uncounted[op.name] = f"{op.opcode} of a matmul, counted once"
        free = op.opcode in _FREE or op.opcode.endswith("-start")
        return dataclasses.replace(inner, operations=int(inner.matmuls > 0 or not free))

    def whole(self, name: str) -> WorkCount:
        if name not in self._known:
            home = self.module.computations[name]
            parts = (self.of(op, home) for op in home.instructions)
            self._known[name] = sum(parts, WorkCount())
        return self._known[name]

    def trips(self, loop: Instruction, home: Computation) -> int:
        count = trip_count(loop, home, self.module)
        # The loop is listed, so that the report says that FLOPs may be missing.
        if count is None:
            self.uncounted[loop.name] = "a loop of unknown length, counted once"
        return 1 if count is None else count

    def _matmul(self, op: Instruction, home: Computation) -> float:
        """Returns the FLOPs of a matmul, convolution or custom call; 0 if unknown."""
        shapes = [home[name].shapes[0] for name in op.operands if home[name].shapes]
        try:
            flops = flops_of(op, shapes)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise not_understood(op.line, "its FLOPs cannot be counted") from error
        if flops is None:
            self._note(op)
        return flops or 0.0

    def _note(self, call: Instruction) -> None:
        """Adds a custom call to `uncounted` if it may contain a matmul."""
        if not _HARMLESS.fullmatch(call.target):
            what = call.target or call.opcode
            self.uncounted[call.name] = f"{what}, its FLOPs counted as 0"

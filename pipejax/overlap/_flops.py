"""Work in a compiled program: FLOPs of its matmuls and convolutions.

`_matmuls` has those of one instruction, `_trips` how often a loop runs. A conditional
counts as its largest branch. A custom call other than a known one of cuBLAS or cuDNN is
named as not counted, unless it is known to multiply nothing.
"""

import dataclasses
import re

from ._collectives import COLLECTIVES
from ._hlo import Computation, Instruction, Module, not_understood
from ._matmuls import DOTS, flops_of
from ._trips import trip_count

# No kernel runs for these: they name memory, or wait, or communicate.
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
# Custom calls that multiply nothing. Any other may, and may even communicate.
_HARMLESS = re.compile(
    r"__cub\$.*|.*TopK|AllocateBuffer|ConcatBitcast|AsyncCollective(Start|Done)"
    r"|PrepareAsyncCall(Start|Done)|SliceId|ZeroCrop|PadToStatic|SliceToDynamic"
    r"|AssumeGatherIndicesInBound|GatherScatterIndicesBitpacked|Sharding"
    r"|SPMDFullToShardShape|SPMDShardToFullShape|MoveTo(Host|Device)|X64(Split|Combine).*"
    r"|annotate_device_placement|LayoutConstraint|LocalSort|xla_.*python_.*callback"
)


@dataclasses.dataclass(frozen=True, order=True)
class Work:
    """What is to be done.

    Attributes:
      flops: of matmuls and convolutions.
      matmuls: how many of them.
      operations: kernels: a fusion is one, whatever is in it.
    """

    flops: float = 0.0
    matmuls: int = 0
    operations: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.matmuls + other.matmuls,
            self.operations + other.operations,
        )

    def times(self, count: int) -> "Work":
        """This, `count` times over."""
        return Work(count * self.flops, count * self.matmuls, count * self.operations)


class Counter:
    """Work of a module's instructions and computations.

    Attributes:
      module: whose.
      uncounted: what could not be counted, by instruction, and why; grows as more is
        looked at.
    """

    def __init__(self, module: Module):
        self.module = module
        self.uncounted: dict[str, str] = {}
        self._known: dict[str, Work] = {}

    def of(self, op: Instruction, home: Computation) -> Work:
        """The work of `op`, an instruction of `home`."""
        if op.opcode == "while":
            parts = [self.whole(name) for name in op.calls]
            return sum(parts, Work()).times(self.trips(op, home))
        if op.opcode == "conditional":
            return max(map(self.whole, op.calls), default=Work())
        if op.opcode == "call":
            return sum(map(self.whole, op.calls), Work())
        if op.opcode.endswith(("-done", "-update")):
            return Work()
        if op.opcode in _MATMULS:
            flops = self._matmul(op, home)
            return Work(flops, int(flops > 0), int(op.target not in _FREE))
        if op.opcode == "custom-call-start":
            self._note(op)
        # The body of a fusion, or of what runs asynchronously, is no kernel of its own.
        inner = sum(map(self.whole, op.calls), Work())
        if inner.matmuls and not op.opcode.endswith(("fusion", "-start")):
            self.uncounted[op.name] = f"{op.opcode} of a matmul, counted once"
        free = op.opcode in _FREE or op.opcode.endswith("-start")
        return dataclasses.replace(inner, operations=int(inner.matmuls > 0 or not free))

    def whole(self, name: str) -> Work:
        """The work of the computation of this name."""
        if name not in self._known:
            home = self.module.computations[name]
            parts = (self.of(op, home) for op in home.instructions)
            self._known[name] = sum(parts, Work())
        return self._known[name]

    def trips(self, loop: Instruction, home: Computation) -> int:
        """How often the body of `loop` runs; 1, and noted, if that is not known."""
        count = trip_count(loop, home, self.module)
        if count is None:
            self.uncounted[loop.name] = "a loop of unknown length, counted once"
        return 1 if count is None else count

    def _matmul(self, op: Instruction, home: Computation) -> float:
        shapes = [home[name].shapes[0] for name in op.operands if home[name].shapes]
        try:
            flops = flops_of(op, shapes)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise not_understood(op.line, "its FLOPs cannot be counted") from error
        if flops is None:
            self._note(op)
        return flops or 0.0

    def _note(self, call: Instruction) -> None:
        """Names a custom call that may be a matmul, whose FLOPs are not known."""
        if not _HARMLESS.fullmatch(call.target):
            what = call.target or call.opcode
            self.uncounted[call.name] = f"{what}, its FLOPs counted as 0"

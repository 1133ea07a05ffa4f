"""Work in a compiled program: FLOPs of its matmuls and convolutions.

Twice the multiplications, as XLA's own cost analysis counts them, which is not to be
had of a text:

- dot: `2 prod(output) prod(contracted)`
- convolution: `2 output features x batch x kernel input features x positions`, where a
  position is a pair of output place and kernel tap that falls on the input; not on
  padding, nor into a hole of a dilation. A TPU's matmuls are convolutions whose batch
  dimensions are such holes.
- ragged dot: that of one group, since each row belongs to one
- cuBLAS and cuDNN calls: the dot or convolution they stand for; any other custom call
  is named as not counted, unless it is known to multiply nothing
- a loop its trip count times, a conditional its largest branch
"""

import dataclasses
import functools
import math
import re

from ._collectives import COLLECTIVES
from ._hlo import Computation, Instruction, Module, Shape, not_understood

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
_DOTS = {"dot", "ragged-dot", "scaled-dot"}
_MATMULS = {*_DOTS, "convolution", "custom-call"}
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
        if "known_trip_count" in loop.config:
            known = loop.config["known_trip_count"]
            count = str(known.get("n")) if isinstance(known, dict) else ""
            if not count.isdecimal():
                loop.refuse(f"its trip count is {known}")
            return int(count)
        counted = _counted(loop, home, self.module)
        if counted is None:
            self.uncounted[loop.name] = "a loop of unknown length, counted once"
        return 1 if counted is None else counted

    def _matmul(self, op: Instruction, home: Computation) -> float:
        shapes = [home[name].shapes[0] for name in op.operands if home[name].shapes]
        try:
            flops = _flops(op, shapes)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise not_understood(op.line, "its FLOPs cannot be counted") from error
        if flops is None:
            self._note(op)
        return flops or 0.0

    def _note(self, call: Instruction) -> None:
        """Names what may well be a matmul, and cannot be looked into."""
        if not _HARMLESS.fullmatch(call.target):
            what = call.target or call.opcode
            self.uncounted[call.name] = f"{what}, its FLOPs counted as 0"


def _flops(op: Instruction, shapes: list[Shape]) -> float | None:
    """FLOPs of a matmul of arrays of these shapes; `None` if they are not known."""
    if op.opcode in _DOTS:
        contracting = op.attributes.get("lhs_contracting_dims", "{}")
        # Groups of what is summed over are as many results: each has a part of the sum.
        if op.attributes.get("lhs_ragged_dims", "none") in contracting:
            return None
        return _dot(shapes[0], op.shapes[0], contracting)
    if op.opcode == "convolution":
        return _convolution(op, shapes[0], shapes[1], op.shapes[0])
    if op.target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        gemm = op.config.get("gemm_backend_config", {})
        dims = gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions")
        if dims is not None:
            return _dot(shapes[0], op.shapes[0], ",".join(map(str, dims)))
    elif op.target.startswith("__cudnn$conv") and "dim_labels" in op.attributes:
        # A backward pass multiplies as often as the forward pass that it belongs to,
        # whose window and labels it carries: put its arrays in their places.
        if op.target.endswith("BackwardInput"):
            return _convolution(op, op.shapes[0], shapes[1], shapes[0])
        if op.target.endswith("BackwardFilter"):
            return _convolution(op, shapes[0], op.shapes[0], shapes[1])
        return _convolution(op, shapes[0], shapes[1], op.shapes[0])
    return None


def _dot(lhs: Shape, out: Shape, contracting: str) -> float:
    """FLOPs of a matmul that sums over these dimensions of `lhs`.

    >>> _dot(Shape("f32", (8, 100)), Shape("f32", (8, 10)), "{1}")
    16000.0
    """
    contracted = (lhs.dims[int(i)] for i in re.findall(r"\d+", contracting))
    return 2.0 * out.size * math.prod(contracted)


def _convolution(op: Instruction, lhs: Shape, rhs: Shape, out: Shape) -> float:
    """FLOPs of a convolution of `lhs` with the kernel `rhs`."""
    left, right, result = re.split("_|->", op.attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=(\S+)", op.attributes.get("window", "{}")[1:-1]))
    taps = window.get("size", "").split("x") if window else []

    def along(field: str, default: int) -> list[int]:
        """One number per spatial dimension; of a padding, the one at the start."""
        values = window[field].split("x") if field in window else [default] * len(taps)
        return [int(str(value).split("_")[0]) for value in values]

    flops = 2.0 * rhs.dims[right.index("i")] * rhs.dims[right.index("o")]
    flops *= lhs.dims[left.index("b")] // int(op.attributes.get("batch_group_count", 1))
    for i in range(len(taps)):
        flops *= _positions(
            inputs=lhs.dims[left.index(str(i))],
            outputs=out.dims[result.index(str(i))],
            taps=int(taps[i]),
            stride=along("stride", 1)[i],
            pad=along("pad", 0)[i],
            lhs_dilate=along("lhs_dilate", 1)[i],
            rhs_dilate=along("rhs_dilate", 1)[i],
        )
    return flops


@functools.cache
def _positions(
    inputs: int,
    outputs: int,
    taps: int,
    stride: int,
    pad: int,
    lhs_dilate: int,
    rhs_dilate: int,
) -> int:
    """Pairs of output and tap that fall on an input, along one dimension.

    >>> _positions(5, 5, 3, 1, 1, 1, 1)  # 15, less one on the padding at each end
    13
    """
    extent = (inputs - 1) * lhs_dilate + 1
    return sum(
        0 <= place < extent and place % lhs_dilate == 0
        for output in range(outputs)
        for place in range(
            output * stride - pad,
            output * stride - pad + taps * rhs_dilate,
            rhs_dilate,
        )
    )


def _counted(loop: Instruction, home: Computation, module: Module) -> int | None:
    """Trip count of `for (i = constant; i < constant; i += constant)`, else `None`.

    Where a backend does not print it (TPU): `i` is an element of the loop's tuple.
    """
    condition = module.computations[loop.attribute("condition").strip("%")]
    body = module.computations[loop.attribute("body").strip("%")]
    test, initial = condition.root, home[loop.operand()]
    if test.attributes.get("direction") != "LT":
        return None
    place, stop = _element(condition, test.operand()), test.operand(1)
    if place is None or {initial.opcode, body.root.opcode} != {"tuple"}:
        return None
    added = body[body.root.operand(place)]
    steps = [name for name in added.operands if _element(body, name) != place]
    if added.opcode != "add" or len(steps) != 1:
        return None
    first, last = _number(home, initial.operand(place)), _number(condition, stop)
    step = _number(body, steps[0])
    if first is None or last is None or step is None or step <= 0:
        return None
    return max(0, -(-(last - first) // step))


def _element(home: Computation, name: str) -> int | None:
    """Which element of its computation's tuple this is."""
    op = _original(home, name)
    if op.opcode != "get-tuple-element" or home[op.operand()].opcode != "parameter":
        return None
    return op.index


def _number(home: Computation, name: str) -> int | None:
    op = _original(home, name)
    integer = op.opcode == "constant" and re.fullmatch(r"-?\d+", op.literal)
    return int(op.literal) if integer else None


def _original(home: Computation, name: str) -> Instruction:
    """What this is a copy of."""
    op = home[name]
    while op.opcode in ("copy", "bitcast"):
        op = home[op.operand()]
    return op

"""Work in a compiled program: FLOPs of its matmuls and convolutions.

Twice the multiplications, as XLA's own cost analysis counts them, which is not to be
had of a text:

- dot: `2 prod(output) prod(contracted)`
- convolution: `2 output features x batch x kernel input features x positions`, where a
  position is a pair of output place and kernel tap that falls on the input; not on
  padding, nor into a hole of a dilation. A TPU's matmuls are convolutions whose batch
  dimensions are such holes.
- cuBLAS and cuDNN calls: the dot or convolution they stand for
- a loop its trip count times, a conditional its largest branch
"""

import dataclasses
import functools
import math
import re

from ._hlo import COLLECTIVES, Computation, Instruction, Module, Shape

# No kernel runs for these: they name memory, or wait, or communicate.
_FREE = {
    *COLLECTIVES,
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "optimization-barrier",
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
_LIBRARY = re.compile(
    r"__cu(?!b\$)|__onednn|matmul|gemm|conv|fmha|attention|tpu_custom_call|triton|mosaic",
    re.IGNORECASE,
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
        pattern = r'"known_trip_count":\{"n":"?(\d+)'
        if known := re.search(pattern, loop.backend_config):
            return int(known.group(1))
        counted = _counted(loop, home, self.module)
        if counted is None:
            self.uncounted[loop.name] = "a loop of unknown length, counted once"
        return 1 if counted is None else counted

    def _matmul(self, op: Instruction, home: Computation) -> float:
        shapes = [home[name].shapes[0] for name in op.operands if home[name].shapes]
        if op.opcode in _DOTS:
            contracting = op.attributes.get("lhs_contracting_dims", "{}")
            return _dot(shapes[0], op.shapes[0], contracting)
        if op.opcode == "convolution":
            return _convolution(op, shapes[0], shapes[1], op.shapes[0])
        if op.target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
            pattern = r'"lhs_contracting_dimensions":\[([^\]]*)\]'
            if dims := re.search(pattern, op.backend_config):
                return _dot(shapes[0], op.shapes[0], dims.group(1))
        elif op.target.startswith("__cudnn$conv") and "dim_labels" in op.attributes:
            # A backward pass multiplies as often as the forward pass that it belongs
            # to, whose window and labels it carries: put its arrays in their places.
            if op.target.endswith("BackwardInput"):
                return _convolution(op, op.shapes[0], shapes[1], shapes[0])
            if op.target.endswith("BackwardFilter"):
                return _convolution(op, shapes[0], op.shapes[0], shapes[1])
            return _convolution(op, shapes[0], shapes[1], op.shapes[0])
        self._note(op)
        return 0.0

    def _note(self, call: Instruction) -> None:
        """Names a custom call that may well be a matmul, and cannot be looked into."""
        if _LIBRARY.search(call.target):
            self.uncounted[call.name] = f"{call.target}, its FLOPs counted as 0"


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
    condition = module.computations[loop.attributes["condition"].strip("%")]
    body = module.computations[loop.attributes["body"].strip("%")]
    test, initial = condition.root, home[loop.operands[0]]
    if test.attributes.get("direction") != "LT" or initial.opcode != "tuple":
        return None
    counter, stop = condition[test.operands[0]], _number(condition, test.operands[1])
    place = int(counter.attributes.get("index", -1))
    if place < 0 or body.root.opcode != "tuple":
        return None
    start = _number(home, initial.operands[place])
    added = body[body.root.operands[place]]
    steps = [_number(body, name) for name in added.operands]
    step = next((n for n in steps if n is not None), 0)
    if added.opcode != "add" or start is None or stop is None or not step:
        return None
    return max(0, -(-(stop - start) // step))


def _number(home: Computation, name: str) -> int | None:
    op = home[name]
    while op.opcode in ("copy", "bitcast"):
        op = home[op.operands[0]]
    integer = op.opcode == "constant" and re.fullmatch(r"-?\d+", op.literal)
    return int(op.literal) if integer else None

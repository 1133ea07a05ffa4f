"""Counts the FLOPs of one matmul or convolution.

A multiplication and its addition are two FLOPs, as in XLA's own cost analysis, which
needs a compiled program.

- A dot has `2 * prod(output) * prod(contracted)` FLOPs, where `output` are the
  dimensions of the result and `contracted` are the dimensions that are summed over.
- A convolution has `2 * batch * input features * output features * positions` FLOPs,
  where the input features are those of the kernel. A position is a pair of an output
  element and a kernel tap that falls on an element of the input, and not on padding or
  into a hole of a dilated input. XLA writes the matmuls of a TPU as convolutions, in
  which a batch dimension is a spatial dimension with such holes.
- A call of cuBLAS or cuDNN has the FLOPs of the dot or convolution that it stands for.
"""

import functools
import math
import re

import numpy as np

from ._module import Instruction, Shape

DOTS = {"dot", "ragged-dot", "scaled-dot"}


def flops_of(op: Instruction, shapes: list[Shape]) -> float | None:
    """Returns the FLOPs of `op` for operands of these shapes, `None` if unknown."""
    if op.opcode in DOTS:
        contracting = op.attributes.get("lhs_contracting_dims", "{}")
        # If the ragged dimension is contracted, each of its groups has a result of its
        # own, and the formula of a dot does not apply.
        ragged = re.findall(r"\d+", op.attributes.get("lhs_ragged_dims", ""))
        if {*ragged} & {*re.findall(r"\d+", contracting)}:
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
        # A backward pass multiplies as often as its forward pass, and has the window
        # and labels of the forward pass. So the arrays are put in the places that they
        # have in the forward pass.
        if op.target.endswith("BackwardInput"):
            return _convolution(op, op.shapes[0], shapes[1], shapes[0])
        if op.target.endswith("BackwardFilter"):
            return _convolution(op, shapes[0], op.shapes[0], shapes[1])
        return _convolution(op, shapes[0], shapes[1], op.shapes[0])
    return None


def _dot(lhs: Shape, out: Shape, contracting: str) -> float:
    contracted = (lhs.dims[int(i)] for i in re.findall(r"\d+", contracting))
    return 2.0 * out.size * math.prod(contracted)


def _convolution(op: Instruction, lhs: Shape, rhs: Shape, out: Shape) -> float:
    left, right, result = re.split("_|->", op.attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=(\S+)", op.attributes.get("window", "{}")[1:-1]))
    taps = window.get("size", "").split("x") if window else []

    def along(field: str, default: int) -> list[int]:
        """Returns `field` of each spatial dimension; of padding, only its start."""
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
    """Counts the pairs of output and tap that fall on an input, along one dimension.

    Examples:
      Five outputs and three taps are 15 pairs. One pair at each end falls on padding:

      >>> _positions(5, 5, 3, 1, 1, 1, 1)
      13
    """
    extent = (inputs - 1) * lhs_dilate + 1
    starts = np.arange(outputs, dtype=np.int64) * stride - pad
    count = 0
    for tap in range(taps):
        places = starts + tap * rhs_dilate
        on_input = (places >= 0) & (places < extent) & (places % lhs_dilate == 0)
        count += int(np.count_nonzero(on_input))
    return count

"""What a lowered step sends, read from its StableHLO text."""

import re

import jax

_BITS = {"f64": 64, "f32": 32, "bf16": 16, "f16": 16}
_ALL_REDUCE = re.compile(
    r'"stablehlo\.all_reduce".*?\}\) : \((?P<operands>[^)]*)\)', re.DOTALL
)
_TENSOR = re.compile(r"tensor<(?:(?P<shape>[\dx]+)x)?(?P<dtype>\w+)>")


def all_reduces(lowered: jax.stages.Lowered) -> list[int]:
    """Bytes that each all-reduce of a program sums, one entry a collective.

    Raises:
      ValueError: if the text holds an all-reduce that this does not understand.
    """
    text = lowered.as_text()
    found = [
        sum(_bytes(tensor) for tensor in _TENSOR.finditer(match["operands"]))
        for match in _ALL_REDUCE.finditer(text)
    ]
    if len(found) != text.count("stablehlo.all_reduce"):
        raise ValueError(
            f"the text has {text.count('stablehlo.all_reduce')} all-reduces, understood"
            f" {len(found)} of them"
        )
    return found


def _bytes(tensor: re.Match[str]) -> int:
    elements = 1
    for extent in filter(None, (tensor["shape"] or "").split("x")):
        elements *= int(extent)
    return elements * _BITS[tensor["dtype"]] // 8

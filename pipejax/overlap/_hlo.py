"""Compiled HLO: a module, its computations, and their instructions in their order.

`_parse` reads them from text. Whatever the text does not have is an error that quotes
the line: nothing here returns a default for an attribute that must be there.
"""

import dataclasses
import functools
import json
import math
import re
from typing import Any, NamedTuple, NoReturn

_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)


class Shape(NamedTuple):
    """Dtype and dimensions of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Bytes without padding; half a byte for each 4-bit number.

        >>> Shape("bf16", (3, 5)).bytes
        30.0
        """
        if self.dtype in ("token", "opaque"):
            return 0.0
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits.group()) / 8 if bits else 1.0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in its module.
      opcode: `"fusion"`, `"all-reduce-start"`, ...
      shapes: of the result's arrays; a tuple's leaves in order.
      operands: names, in the same computation.
      literal: what stands in the brackets of a constant or parameter.
      attributes: text by name, as printed.
      line: as printed.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: dict[str, str]
    line: str

    def operand(self, place: int = 0) -> str:
        """Returns the name of an operand, which must be there."""
        if place >= len(self.operands):
            self.refuse(f"it has {len(self.operands)} operands")
        return self.operands[place]

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute, which must be there."""
        if name not in self.attributes:
            self.refuse(f"it has no attribute {name!r}")
        return self.attributes[name]

    @property
    def index(self) -> int:
        """Element of a tuple that a `get-tuple-element` takes."""
        text = self.attribute("index")
        if not text.isdecimal():
            self.refuse(f"{text!r} is no index")
        return int(text)

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        texts = [self.attributes[key] for key in _CALLS if key in self.attributes]
        return tuple(name.strip("{}% ") for text in texts for name in text.split(","))

    @property
    def op_name(self) -> str:
        """The JAX operation that it comes from, or an empty string."""
        found = re.search(
            r'op_name="((?:\\.|[^"\\])*)"', self.attributes.get("metadata", "")
        )
        return found.group(1).replace("\\'", "'") if found else ""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The backend's configuration, if it is JSON (in older texts, in a string)."""
        text = self.attributes.get("backend_config", "")
        text = text[1:-1].replace('\\"', '"') if text.startswith('"') else text
        try:
            found = json.loads(text)
        except json.JSONDecodeError:  # Other languages also use braces.
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def frontend(self) -> dict[str, str]:
        """The framework's attributes, without quotation marks."""
        text = self.attributes.get("frontend_attributes", "{}")[1:-1]
        parted = (piece.partition("=") for piece in split(text))
        return {key: value.strip('"') for key, _, value in parted}

    @property
    def target(self) -> str:
        """Of a custom call."""
        return self.attributes.get("custom_call_target", "").strip('"')

    def refuse(self, why: str) -> NoReturn:
        """Raises a `ValueError` that quotes the line."""
        raise not_understood(self.line, why)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order they run, and the one whose value is returned."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[self.index[name]]

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Place in the schedule by name."""
        return {op.name: i for i, op in enumerate(self.instructions)}

    def shapes_of(self, operands: tuple[str, ...]) -> list[Shape]:
        """Of all arrays in these operands."""
        return [shape for name in operands for shape in self[name].shapes]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    name: str
    is_scheduled: bool
    num_partitions: int
    replica_count: int
    computations: dict[str, Computation]
    entry: Computation


# Strings are skipped whole: names of operations hold brackets and commas of their own.
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|' + r"'(?:\\.|[^'\\])*'|[][(){},]")


def split(text: str) -> list[str]:
    """Pieces between the commas that no bracket or string encloses.

    >>> split("a, b={1,2}, c=f(3, 4)")
    ['a', 'b={1,2}', 'c=f(3, 4)']
    """
    pieces, depth, start = [], 0, 0
    for token in TOKEN.finditer(text):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        if token.group() == "," and not depth:
            pieces.append(text[start : token.start()].strip())
            start = token.end()
    last = text[start:].strip()
    return [*pieces, last] if last else pieces


def not_understood(line: str, why: str) -> ValueError:
    """Makes the error for text that cannot be read."""
    line = line.strip()
    shown = line if len(line) < 600 else f"{line[:600]}..."
    return ValueError(
        "`program` must be HLO text as `Compiled.as_text()` prints it, unchanged. If it"
        f" is, please report this line; {why}:\n{shown}"
    )

"""Compiled HLO as Python objects: a module, its computations and their instructions.

An attribute or operand that must be there has no default: if the text lacks it, the
error quotes the line.
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
    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Returns the size in bytes without padding."""
        # A 4-bit number takes half a byte, and a token takes no memory.
        if self.dtype in ("token", "opaque"):
            return 0.0
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits.group()) / 8 if bits else 1.0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the arrays in the result, or the leaves of a tuple
    operands: tuple[str, ...]  # names of instructions in the same computation
    literal: str  # text between the parentheses of a constant or parameter
    attributes: dict[str, str]  # text of each attribute as printed
    line: str

    def operand(self, place: int = 0) -> str:
        if place >= len(self.operands):
            self.refuse(f"it has {len(self.operands)} operands")
        return self.operands[place]

    def attribute(self, name: str) -> str:
        if name not in self.attributes:
            self.refuse(f"it has no attribute {name!r}")
        return self.attributes[name]

    @property
    def index(self) -> int:
        """Returns the index of the tuple element that a `get-tuple-element` reads."""
        text = self.attribute("index")
        if not text.isdecimal():
            self.refuse(f"{text!r} is not an index")
        return int(text)

    @property
    def calls(self) -> tuple[str, ...]:
        texts = [self.attributes[key] for key in _CALLS if key in self.attributes]
        return tuple(name.strip("{}% ") for text in texts for name in text.split(","))

    @property
    def op_name(self) -> str:
        """Returns the JAX operation that the instruction is from, or an empty text."""
        found = re.search(
            r'op_name="((?:\\.|[^"\\])*)"', self.attributes.get("metadata", "")
        )
        return found.group(1).replace("\\'", "'") if found else ""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Returns the backend's configuration if it is JSON, or else an empty dict."""
        text = self.attributes.get("backend_config", "")
        # Older HLO texts print the JSON inside a string.
        text = text[1:-1].replace('\\"', '"') if text.startswith('"') else text
        try:
            found = json.loads(text)
        except json.JSONDecodeError:  # Some backends use braces in another format.
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def frontend(self) -> dict[str, str]:
        text = self.attributes.get("frontend_attributes", "{}")[1:-1]
        parted = (piece.partition("=") for piece in split(text))
        return {key: value.strip('"') for key, _, value in parted}

    @property
    def target(self) -> str:
        """Returns the target of a custom call; empty for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    def refuse(self, why: str) -> NoReturn:
        raise not_understood(self.line, why)


@dataclasses.dataclass(frozen=True)
class Computation:
    """An HLO computation, whose instructions are in the order of the text."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[self.index[name]]

    @functools.cached_property
    def index(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.instructions)}

    def shapes_of(self, operands: tuple[str, ...]) -> list[Shape]:
        return [shape for name in operands for shape in self[name].shapes]


@dataclasses.dataclass(frozen=True)
class Module:
    name: str
    is_scheduled: bool  # whether instructions stand in the order in which they run
    num_partitions: int  # of each replica
    replica_count: int
    computations: dict[str, Computation]
    entry: Computation  # the computation that the program starts with


# A string is one token, because names of operations contain brackets and commas.
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|' + r"'(?:\\.|[^'\\])*'|[][(){},]")


def split(text: str) -> list[str]:
    """Splits text at the commas that are outside all brackets and strings.

    Examples:
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
    """Returns the error for a line that cannot be read, with the reason as a clause."""
    line = line.strip()
    shown = line if len(line) < 600 else f"{line[:600]}..."
    return ValueError(
        "`program` must be HLO text exactly as `Compiled.as_text()` prints it. If it"
        f" is, please report the following line, because {why}:\n{shown}"
    )

"""Compiled HLO, read from its text.

A line of a computation is `[ROOT] %name = shape opcode(operands), attribute=value, ...`
and, once a module is scheduled, its lines stand in the order in which they run.

- `f32[8]{0}`, `bf16[2,3]{1,0:T(8,128)(2,1)S(1)}`: dtype, dimensions, layout
- `((f32[8]{0}), f32[8]{0}) all-reduce-start(%x)`: results in flight are tuples
- `calls=%f`, `to_apply=%f`, `body=%f`: computations that an instruction runs
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

# What devices do with one another; `opcode-start` and `opcode-done` when asynchronous.
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
    "recv",
)
# Strings are skipped whole: names of operations hold brackets and commas of their own.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[][(){},]')
_HEAD = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[^\s=%]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(%]+) (?:\(.*)?\{$")
_TABLE = re.compile(r'(FileNames|FunctionNames|FileLocations|StackFrames)$|\d+ ["{].*$')
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
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

    @property
    def backend_config(self) -> str:
        """JSON, unread; in older texts it is a string with escapes."""
        text = self.attributes.get("backend_config", "")
        return text[1:-1].replace('\\"', '"') if text.startswith('"') else text

    @property
    def target(self) -> str:
        """Of a custom call."""
        return self.attributes.get("custom_call_target", "").strip('"')


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


def parse(text: str) -> Module:
    """The module in `text`, as `jax.stages.Compiled.as_text` prints it.

    Raises:
      ValueError: with the first line that is not understood.
    """
    lines = text.strip("\n").split("\n")
    if not lines[0].startswith("HloModule "):
        raise _not_understood(lines[0], "HLO begins with `HloModule`")
    name, *rest = split(lines[0].removeprefix("HloModule "))
    header = _attributes(rest, lines[0])
    computations: dict[str, Computation] = {}
    entry, current = "", ""
    body: list[str] = []
    for line in lines[1:]:
        if current and line.startswith("}"):
            computations[current] = _computation(current, body)
            current = ""
        elif current:
            body.append(line)
        elif begins := _COMPUTATION.match(line):
            current, body = begins["name"], []
            entry = current if begins["entry"] else entry
        elif line.strip() and not _TABLE.match(line):
            raise _not_understood(line, "no computation begins here")
    if current or entry not in computations:
        raise _not_understood(lines[-1], "it ends within, or without, its ENTRY")
    return Module(
        name=name,
        is_scheduled=header.get("is_scheduled") == "true",
        num_partitions=int(header.get("num_partitions", 1)),
        replica_count=int(header.get("replica_count", 1)),
        computations=computations,
        entry=computations[entry],
    )


def group_size(collective: Instruction, module: Module) -> int:
    """Devices that exchange with each other, whichever way the groups are written.

    - `{{0,1},{2,3}}`: listed
    - `[2,4]<=[8]`, with `T(1,0)` or without: 2 groups of 4
    - `mesh['data'=64,'model'=2] {'data'}`: along the named axes of a mesh
    - `{}`: all of them
    - `source_target_pairs={{0,1},{1,0}}`: who sends or receives
    """
    if pairs := collective.attributes.get("source_target_pairs"):
        return len(set(re.findall(r"\d+", pairs)))
    groups = collective.attributes.get("replica_groups", "{}")
    if groups.startswith("mesh["):
        mesh, axes = groups.split("]", 1)[0], groups[groups.rindex("{") :]
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", axes)
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota.group(1))
    if listed := re.match(r"\{\{([\d,\s]+)\}", groups):
        return len(listed.group(1).split(","))
    if groups != "{}":
        raise _not_understood(collective.line, "unknown `replica_groups`")
    partitions = module.num_partitions if "channel_id" in collective.attributes else 1
    return module.replica_count * partitions


def split(text: str) -> list[str]:
    """Pieces between the commas that no bracket or string encloses.

    >>> split("a, b={1,2}, c=f(3, 4)")
    ['a', 'b={1,2}', 'c=f(3, 4)']
    """
    pieces, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        if token.group() == "," and not depth:
            pieces.append(text[start : token.start()].strip())
            start = token.end()
    last = text[start:].strip()
    return [*pieces, last] if last else pieces


def _computation(name: str, lines: list[str]) -> Computation:
    instructions = tuple(_instruction(line) for line in lines)
    roots = [i for i, line in enumerate(lines) if line.lstrip().startswith("ROOT ")]
    if len(roots) != 1:
        raise _not_understood(f"%{name}", f"a computation with {len(roots)} ROOTs")
    return Computation(name, instructions, instructions[roots[0]])


def _instruction(line: str) -> Instruction:
    plain = re.sub(r"/\*index=\d+\*/", "", line)
    head = _HEAD.match(plain)
    if not head:
        raise _not_understood(line, "an instruction is `%name = shape opcode(...)`")
    start = head.end()
    after = _end(plain, start, line) if plain[start] == "(" else plain.find(" ", start)
    opcode = _OPCODE.match(plain, after)
    if after < 0 or not opcode:
        raise _not_understood(line, "it has no opcode")
    end = _end(plain, opcode.end() - 1, line)
    inner = plain[opcode.end() : end - 1]
    literal = opcode.group(1) in ("constant", "parameter")
    return Instruction(
        name=head["name"],
        opcode=opcode.group(1),
        shapes=_shapes(plain[start:after], line),
        # Older texts put an operand's shape before its name.
        operands=() if literal else tuple(x.split("%")[-1] for x in split(inner)),
        literal=inner if literal else "",
        attributes=_attributes(split(plain[end:].removeprefix(",")), line),
        line=line.strip(),
    )


def _end(text: str, start: int, line: str) -> int:
    """Just past the bracket that closes the one at `start`."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        if not depth:
            return token.end()
    raise _not_understood(line, "a bracket is not closed")


def _shapes(text: str, line: str) -> tuple[Shape, ...]:
    found = _SHAPE.findall(text)
    try:
        return tuple(
            Shape(dtype, tuple(int(d.lstrip("<= ")) for d in dims.split(",") if d))
            for dtype, dims in found
        )
    except ValueError:
        raise _not_understood(line, f"unknown shape {text!r}") from None


def _attributes(pieces: list[str], line: str) -> dict[str, str]:
    for piece in pieces:
        if "=" not in piece:
            raise _not_understood(line, f"{piece!r} is no attribute")
    parted = (piece.partition("=") for piece in pieces)
    return {key: value for key, _, value in parted}


def _not_understood(line: str, why: str) -> ValueError:
    shown = line.strip() if len(line) < 300 else f"{line.strip()[:300]}..."
    return ValueError(
        f"`program` must be HLO text as `Compiled.as_text()` prints it; {why}:\n{shown}"
    )

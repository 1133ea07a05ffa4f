"""Parses the text of compiled HLO.

A line of a computation has the form
`[ROOT] %name = shape opcode(operands), attribute=value, ...`. In a scheduled module the
lines stand in the order in which the instructions run. Some parts of a line:

- `f32[8]{0}`, `bf16[2,3]{1,0:T(8,128)(2,1)S(1)}`: the dtype, dimensions and layout of
  an array.
- `((f32[8]{0}), f32[8]{0}) all-reduce-start(%x)`: a tuple, which is the result of the
  start of an asynchronous instruction.
- `calls=%f`, `to_apply=%f`, `body=%f`: computations that the instruction calls.
- `replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}`: the only attribute
  whose value has a comma outside of brackets.
"""

import re

from ._module import (
    TOKEN,
    Computation,
    Instruction,
    Module,
    Shape,
    not_understood,
    split,
)

_HEAD = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[^\s=%]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(%]+) (?:\(.*)?\{$")
_TABLE = re.compile(r'(FileNames|FunctionNames|FileLocations|StackFrames)$|\d+ ["{].*$')
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")


def parse(text: str) -> Module:
    """Parses the text of a module, as `jax.stages.Compiled.as_text` returns it."""
    lines = text.strip("\n").split("\n")
    if not lines[0].startswith("HloModule "):
        raise not_understood(lines[0], "HLO text begins with `HloModule`")
    name, *rest = split(lines[0].removeprefix("HloModule "))
    header = _attributes(rest, lines[0])
    computations: dict[str, Computation] = {}
    entry, current = "", ""
    body: list[str] = []
    for line in lines[1:]:
        if current and line.startswith("}"):
            computations[current] = _computation(current, body, computations)
            current = ""
        elif current:
            body.append(line)
        elif begins := _COMPUTATION.match(line):
            current, body = begins["name"], []
            entry = current if begins["entry"] else entry
        elif line.strip() and not _TABLE.match(line):
            raise not_understood(line, "no computation begins here")
    if current or entry not in computations:
        raise not_understood(
            lines[-1], "the text ends inside a computation or has no ENTRY computation"
        )
    return Module(
        name=name,
        is_scheduled=header.get("is_scheduled") == "true",
        num_partitions=_count(header, "num_partitions", lines[0]),
        replica_count=_count(header, "replica_count", lines[0]),
        computations=computations,
        entry=computations[entry],
    )


def _count(header: dict[str, str], name: str, line: str) -> int:
    text = header.get(name, "1")
    if not re.fullmatch(r"[1-9]\d*", text):
        raise not_understood(line, f"`{name}` is not a positive integer")
    return int(text)


def _computation(
    name: str, lines: list[str], before: dict[str, Computation]
) -> Computation:
    """Parses a computation, in which all names must be defined before they are used."""
    instructions: dict[str, Instruction] = {}
    roots = []
    for line in lines:
        op = _instruction(line)
        unknown = [x for x in op.operands if x not in instructions]
        unknown += [x for x in op.calls if x not in before]
        if unknown or op.name in instructions:
            name = [*unknown, op.name][0]
            raise not_understood(
                line, f"%{name} must be defined before it, and only once"
            )
        instructions[op.name] = op
        roots += [op] if line.lstrip().startswith("ROOT ") else []
    if len(roots) != 1:
        raise not_understood(
            f"%{name}", f"this computation has {len(roots)} ROOT instructions"
        )
    return Computation(name, tuple(instructions.values()), roots[0])


def _instruction(line: str) -> Instruction:
    plain = re.sub(r"/\*index=\d+\*/", "", line)
    head = _HEAD.match(plain)
    if not head:
        raise not_understood(
            line, "an instruction has the form `%name = shape opcode(...)`"
        )
    start = head.end()
    is_tuple = plain.startswith("(", start)
    after = _end(plain, start, line) if is_tuple else plain.find(" ", start)
    opcode = _OPCODE.match(plain, after)
    if after < 0 or not opcode:
        raise not_understood(line, "it has no opcode")
    end = _end(plain, opcode.end() - 1, line)
    inner = plain[opcode.end() : end - 1]
    literal = opcode.group(1) in ("constant", "parameter")
    return Instruction(
        name=head["name"],
        opcode=opcode.group(1),
        shapes=_shapes(plain[start:after], line),
        # Older HLO texts print the shape of an operand before its name.
        operands=() if literal else tuple(x.split("%")[-1] for x in split(inner)),
        literal=inner if literal else "",
        attributes=_attributes(split(plain[end:].removeprefix(",")), line),
        line=line.strip(),
    )


def _end(text: str, start: int, line: str) -> int:
    """Returns the position after the bracket that closes the one at `start`."""
    depth = 0
    for token in TOKEN.finditer(text, start):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        if not depth:
            return token.end()
    raise not_understood(line, "a bracket is not closed")


def _shapes(text: str, line: str) -> tuple[Shape, ...]:
    found = _SHAPE.findall(text)
    try:
        return tuple(
            Shape(dtype, tuple(int(d.lstrip("<= ")) for d in dims.split(",") if d))
            for dtype, dims in found
        )
    except ValueError:
        raise not_understood(line, f"{text!r} is an unknown shape") from None


def _attributes(pieces: list[str], line: str) -> dict[str, str]:
    attributes: dict[str, str] = {}
    key = ""
    for piece in pieces:
        if piece.startswith("device_ids=(") and key:
            attributes[key] += f", {piece}"
            continue
        key, equals, value = piece.partition("=")
        if not equals:
            raise not_understood(line, f"{piece!r} is not an attribute")
        attributes[key] = value
    return attributes

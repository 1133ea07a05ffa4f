"""Finds out how often a loop runs.

Most backends print the trip count of a loop: `"known_trip_count":{"n":"5"}`. The TPU
backend does not. Its trip counts are computed here if the loop has the form
`for (i = constant; i < constant; i += constant)` and `i` is an element of the tuple
that the loop carries.
"""

import re

from ._module import Computation, Instruction, Module


def trip_count(loop: Instruction, home: Computation, module: Module) -> int | None:
    """Returns how often the body of a `while` in `home` runs; `None` if unknown."""
    if "known_trip_count" in loop.config:
        known = loop.config["known_trip_count"]
        count = str(known.get("n")) if isinstance(known, dict) else ""
        if not count.isdecimal():
            loop.refuse(f"its trip count is {known}")
        return int(count)
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
    """Returns the index of `name` in the tuple that `home` is given, or `None`."""
    op = _original(home, name)
    if op.opcode != "get-tuple-element" or home[op.operand()].opcode != "parameter":
        return None
    return op.index


def _number(home: Computation, name: str) -> int | None:
    op = _original(home, name)
    integer = op.opcode == "constant" and re.fullmatch(r"-?\d+", op.literal)
    return int(op.literal) if integer else None


def _original(home: Computation, name: str) -> Instruction:
    """Follows copies and bitcasts from `name` to the instruction that they copy."""
    op = home[name]
    while op.opcode in ("copy", "bitcast"):
        op = home[op.operand()]
    return op

"""How often a loop runs.

Most backends print it: `"known_trip_count":{"n":"5"}`. The one for TPUs does not. There
it is counted if the loop is `for (i = constant; i < constant; i += constant)` and `i`
an element of the loop's tuple.
"""

import re

from ._hlo import Computation, Instruction, Module


def trip_count(loop: Instruction, home: Computation, module: Module) -> int | None:
    """Counts how often the body of a `while` of `home` runs; `None` if not known."""
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
    """Returns the element of its computation's tuple that this is, if any."""
    op = _original(home, name)
    if op.opcode != "get-tuple-element" or home[op.operand()].opcode != "parameter":
        return None
    return op.index


def _number(home: Computation, name: str) -> int | None:
    op = _original(home, name)
    integer = op.opcode == "constant" and re.fullmatch(r"-?\d+", op.literal)
    return int(op.literal) if integer else None


def _original(home: Computation, name: str) -> Instruction:
    """Returns the instruction that this is a copy of."""
    op = home[name]
    while op.opcode in ("copy", "bitcast"):
        op = home[op.operand()]
    return op

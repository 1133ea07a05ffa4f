"""Cuts a function into segments of given shares of its work.

Where one segment ends, an executor can wait for one collective and start the next. A
cut may lie between any two operations, for example between forward and backward pass,
between microbatches, or between layers. The places are chosen so that the segments come
as near to their shares as possible. If no place between operations is near enough, a
`lax.scan` is itself cut: L iterations become k, then L - k.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pipejax._internal.jaxpr import (
    Constant,
    Equation,
    inlined,
    name_of,
    runner,
    value_of,
)
from pipejax._internal.types import ClosedJaxpr

from ._flops import flops_of
from ._scan import TracedOperation, scan_operation

Segment = Callable[[list[Any]], list[Any]]

# The names of operations that XLA repeats rather than keeping their results.
_NAMES = """
abs add add_any and broadcast_in_dim ceil clamp convert_element_type copy eq expand_dims
floor ge gt integer_pow iota is_finite le lt max min mul ne neg not or reshape select_n
sign slice squeeze square sub transpose xor
"""
_CHEAP = frozenset(_NAMES.split())
_SMALL = 16  # an operand is small beside a result of this many times its elements


def segments_of(
    function: Callable[..., Any], fractions: Sequence[float], *args: Any
) -> tuple[list[Segment], Callable[[list[Any]], Any]]:
    """Cuts `function` into segments, to be run one after another.

    Args:
      fractions: The share of the work of each segment. Together they are 1.

    Returns:
      The segments, and a function that makes the result of `function` from the list
      that the last segment returns. Each segment is a function of the list of arrays
      that the segment before it returned. The first segment is given an empty list.
    """
    if len(fractions) == 1:
        whole = function(*args)
        leaves, tree = jax.tree.flatten(whole)
        return [lambda _: leaves], lambda values: jax.tree.unflatten(tree, values)
    # Forward and backward pass are traced as one list of operations.
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr, tree = closed.jaxpr, jax.tree.structure(shape)
    names: dict[Any, Any] = {v: object() for v in jaxpr.invars}
    known = {
        names[v]: x for v, x in zip(jaxpr.invars, jax.tree.leaves(args), strict=True)
    }
    operations = list(_operations(closed, names))
    results = tuple(name_of(names, v) for v in jaxpr.outvars)
    # `_points` may replace a scan in `operations` by its halves.
    points = _points(operations, fractions)
    parts = _repeating([operations[a:b] for a, b in itertools.pairwise(points)], known)
    handed = _handed(parts, results)
    segments = [
        _segment(part, known, before, after)
        for part, (before, after) in zip(parts, itertools.pairwise(handed), strict=True)
    ]

    def result(values: list[Any]) -> Any:
        env = known | dict(zip(handed[-1], values, strict=True))
        return jax.tree.unflatten(tree, [value_of(env, name) for name in results])

    return segments, result


def _repeating(
    parts: list[list[TracedOperation]], known: dict[Any, Any]
) -> list[list[TracedOperation]]:
    """Returns segments that repeat cheap operations rather than hand on results.

    Without a cut, XLA repeats such operations wherever their results are needed. With a
    cut it cannot, and would keep every mask and every cast of an activation.
    """
    found = parts[:1]
    for i in range(1, len(parts)):
        earlier = dict.fromkeys(operation for part in found for operation in part)
        needed = {
            n for rest in parts[i:] for operation in rest for n in operation.reads
        }
        # `there` has what is at hand after the cut: arguments, what is handed on
        # anyway, and the results of operations that are repeated.
        there, again = set(known), []
        for operation in earlier:
            if operation.cheap and there.issuperset(operation.large):
                again.append(operation)
                there.update(operation.writes)
            else:
                there.update(needed.intersection(operation.writes))
        # From the last to the first, only those that something needs.
        repeated: list[TracedOperation] = []
        for operation in reversed(again):
            if needed.intersection(operation.writes):
                repeated.insert(0, operation)
                needed.update(operation.reads)
        found.append([*repeated, *parts[i]])
    return found


def _handed(
    parts: list[list[TracedOperation]], results: tuple[Any, ...]
) -> list[list[Any]]:
    """Returns the names of the values that each segment is given, and of the results.

    A segment hands on what is written so far, and what a later segment reads before it
    writes it, or the function returns.
    """
    # Liveness from the end: what a segment reads before it writes it must be handed to
    # it.
    live = [{n for n in results if not isinstance(n, Constant)}]
    for part in reversed(parts):
        reads = set(live[0])
        for operation in reversed(part):
            reads.difference_update(operation.writes)
            reads.update(n for n in operation.reads if not isinstance(n, Constant))
        live.insert(0, reads)
    handed, written = [list[Any]()], dict[Any, None]()
    for part, wanted in zip(parts, live[1:], strict=True):
        written |= dict.fromkeys(n for operation in part for n in operation.writes)
        handed.append([name for name in written if name in wanted])
    return handed


def _segment(
    part: list[TracedOperation],
    known: dict[Any, Any],
    before: list[Any],
    after: list[Any],
) -> Segment:
    """Returns a function that runs the operations of one segment."""

    def segment(values: list[Any]) -> list[Any]:
        env = known | dict(zip(before, values, strict=True))
        for operation in part:
            outputs = operation.run(*(value_of(env, name) for name in operation.reads))
            env.update(zip(operation.writes, outputs, strict=True))
        return [env[name] for name in after]

    return segment


def _points(operations: list[TracedOperation], fractions: Sequence[float]) -> list[int]:
    """Returns the indices in `operations` at which the segments begin, and the end.

    Cuts a scan in two, in place, if both ends of the scan are more than half a short
    segment away from where a segment should begin, or if no work would follow.
    """
    total = sum(operation.flops for operation in operations)
    points = [0]
    inner = fractions[:-1]  # the last segment ends with the function
    short = min(fraction for fraction in fractions if not _is_few(fraction, fractions))
    for fraction, ends in zip(inner, itertools.accumulate(inner), strict=True):
        # Whole operations up to the target; the next one reaches beyond it.
        target, reached, index = total * ends, 0.0, 0
        while index < len(operations) and reached + operations[index].flops <= target:
            reached += operations[index].flops
            index += 1
        if index < len(operations) and total:
            operation = operations[index]
            inside = (target - reached) / operation.flops
            # The distance from the target to the nearer end of the operation that
            # contains it.
            off = min(inside, 1 - inside) * operation.flops
            nearer = index + (inside > 0.5)
            leaves_none = not any(x.flops for x in operations[nearer:])
            if operation.halves and (leaves_none or off > total * short / 2):
                operations[index : index + 1] = operation.halves(inside)
                index += 1
            elif not leaves_none:
                index = nearer
        empty = not any(x.flops for x in operations[points[-1] : index])
        if _is_few(fraction, fractions) or empty:
            index = _least(operations, points[-1], fraction * total)
        points.append(index)
    return [*points, len(operations)]


def _is_few(fraction: float, fractions: Sequence[float]) -> bool:
    """Returns whether a stage sends only a few numbers.

    Such a stage needs something to wait beside, but not its exact share.
    """
    return fraction * len(fractions) < 0.1


def _least(operations: list[TracedOperation], start: int, flops: float) -> int:
    """Returns the end of the shortest segment from `start` that has any work."""
    for index in range(start, len(operations)):
        operation = operations[index]
        if operation.flops > flops and operation.halves is not None:
            # In place, as in `_points`.
            operations[index : index + 1] = operation.halves(flops / operation.flops)
        if operation.flops:
            return index + 1
    return len(operations)


def _operations(
    closed: ClosedJaxpr, names: dict[Any, Any]
) -> Iterator[TracedOperation]:
    """Yields the operations of a program, with the functions that it calls inlined."""
    for found in inlined(closed, names):
        equation, _, reads, writes = found
        if equation.primitive.name == "scan":
            yield scan_operation(equation, reads, writes)
        else:
            run, flops = runner(found), flops_of(equation)
            cheap = equation.primitive.name in _CHEAP
            large = _large(found) if cheap else ()
            yield TracedOperation(flops, reads, writes, run, cheap=cheap, large=large)


def _large(found: Equation) -> tuple[Any, ...]:
    written = sum(v.aval.size for v in found.equation.outvars)
    operands = zip(found.reads, found.equation.invars, strict=True)
    return tuple(
        name
        for name, v in operands
        if not isinstance(name, Constant) and _SMALL * v.aval.size > written
    )

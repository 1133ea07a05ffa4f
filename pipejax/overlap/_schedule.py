"""Which stretch of a schedule each collective is under way in.

A collective begins where its operands are handed over and ends where its result is
waited for; whatever runs between is beside it.

- `all-reduce`, or a start with `"is_sync":true`: all wait, nothing is beside it
- `all-reduce-start` ... `all-reduce-done`, `async-start` ... `async-done`
- `call-start` ... `call-update` ... `call-done`, on a TPU's sparse cores: begins at the
  update where that brings the operands
- a TPU v5e's fusions: one holds AsyncCollectiveStart, one AsyncCollectiveDone, and
  those between them that hold the same collective continue it beside their own compute
- a start that a loop hands to its next iteration: from there to the end of the body,
  and from the body's top to the done
"""

from typing import NamedTuple

from ._hlo import COLLECTIVES, Computation, Instruction, Module

# Other work that may run asynchronously; a collective only if it calls one.
_ASYNC = {
    "async",
    "call",
    "copy",
    "custom-call",
    "dynamic-slice",
    "dynamic-update-slice",
    "fusion",
    "gather",
    "scatter",
    "slice",
    "sort",
}
_COPIES = ("copy", "dynamic-slice", "dynamic-update-slice", "slice")
_WAITS = ("-update", "-done")
_SAME = ("bitcast", "copy", "optimization-barrier")


class Span(NamedTuple):
    """A collective in the schedule of one computation.

    Attributes:
      start: the instruction that begins it.
      op: the collective: `start` itself, or what is wrapped in it.
      home: the computation of `op`.
      at: place of `start` in the schedule.
      stretches: of the schedule, that it is under way in; none if it is synchronous.
    """

    start: Instruction
    op: Instruction
    home: Computation
    at: int
    stretches: tuple[range, ...]

    @property
    def kind(self) -> str:
        """One of `COLLECTIVES`."""
        return self.op.opcode.removesuffix("-start")


class Finder:
    """Finds collectives, and keeps account of the computations that hold them.

    Attributes:
      module: where.
      seen: names of computations whose collectives are found.
    """

    def __init__(self, module: Module):
        self.module = module
        self.seen: set[str] = set()

    def spans(self, home: Computation) -> list[Span]:
        """Collectives that begin in `home` itself, not in a loop or branch of it.

        Raises:
          ValueError: for an asynchronous instruction of a kind not known, and for a
            collective that begins and does not end, or the other way round.
        """
        self.seen.add(home.name)
        here, above, fused = *self._ends(home), self._fused(home)
        found = []
        for at, start in enumerate(home.instructions):
            for op, inside in self.collectives_of(start, home):
                if start.opcode == "fusion":
                    stretches = fused.get(at)
                elif not _is_start(start) or _is_synchronous(start, op):
                    stretches = ()
                else:
                    stretches = _stretches(at, home, here, above)
                if stretches is not None:
                    found.append(Span(start, op, inside, at, stretches))
        return found

    def collectives_of(
        self, op: Instruction, home: Computation
    ) -> list[tuple[Instruction, Computation]]:
        """The collectives that `op` is or wraps, each with its own computation."""
        if is_collective(op):
            return [(op, home)]
        if _base(op) in COLLECTIVES:
            return []
        if op.opcode.endswith(("-start", *_WAITS)) and _base(op) not in _ASYNC:
            raise ValueError(
                "`program` must have no asynchronous instructions but collectives and"
                f" {', '.join(sorted(_ASYNC))}; got {op.opcode!r}, which may hide a"
                f" collective. Please report it:\n{op.line[:300]}"
            )
        found = []
        if op.opcode in ("fusion", "custom-call") or _is_start(op):
            for name in op.calls:
                inside = self.module.computations[name]
                inner = [self.collectives_of(x, inside) for x in inside.instructions]
                if any(inner):
                    self.seen.add(name)
                found += [one for several in inner for one in several]
        return found

    def _ends(self, home: Computation) -> tuple[dict[str, int], dict[str, int]]:
        """Where each start of `home` is waited for, and where in the next iteration."""
        here: dict[str, int] = {}
        above: dict[str, int] = {}
        for at, op in enumerate(home.instructions):
            if not op.opcode.endswith("-done") or _base(op) in _COPIES:
                continue
            origin, place = _origin(home, op.operands[0])
            if origin.opcode == "while":
                # The last of a loop, whose others have ended in it.
                body = self.module.computations[origin.attributes["body"].strip("%")]
                if _is_start(_handed_on(body, place)):
                    continue
            ends = above if origin.opcode == "parameter" else here
            origin = _handed_on(home, place) if ends is above else origin
            if not _is_start(origin):
                raise _unpaired(op, "is waited for and started nowhere")
            ends[origin.name] = at
        return here, above

    def _fused(self, home: Computation) -> dict[int, tuple[range, ...]]:
        """Stretches of what fusions of `home` begin, by the place of the first."""
        found: dict[int, tuple[range, ...]] = {}
        begun: dict[str, int] = {}
        for at, op in enumerate(home.instructions):
            held = self.collectives_of(op, home) if op.opcode == "fusion" else []
            if not held:
                continue
            channel = held[0][0].attributes.get("channel_id", "")
            targets = {x.target for x in held[0][1].instructions}
            if "AsyncCollectiveStart" in targets:
                if channel in begun:
                    raise _unpaired(op, "is started while it is under way")
                begun[channel] = at
            elif "AsyncCollectiveDone" in targets:
                if channel not in begun:
                    raise _unpaired(op, "is waited for and started nowhere")
                start = begun.pop(channel)
                found[start] = (range(start + 1, at),)
            elif channel not in begun:
                found[at] = ()
        for at in begun.values():
            raise _unpaired(home.instructions[at], "is started and never waited for")
        return found


def is_collective(op: Instruction) -> bool:
    """Whether `op` is a collective, or the start of one, between devices."""
    to_host = op.attributes.get("is_host_transfer") == "true"
    return op.opcode.removesuffix("-start") in COLLECTIVES and not to_host


def _stretches(
    at: int, home: Computation, here: dict[str, int], above: dict[str, int]
) -> tuple[range, ...]:
    """From the start at this place to where it is waited for."""
    start, begin = home.instructions[at], at + 1
    for i, op in enumerate(home.instructions):
        # Without operands it only prepares; the update brings them.
        brings = op.opcode.endswith("-update") and len(op.operands) > 1
        if brings and not start.operands and op.operands[0] == start.name:
            begin = i + 1
    if start.name in here:
        return (range(begin, here[start.name]),)
    if start.name in above:
        end = above[start.name]
        rest = range(begin, len(home.instructions))
        return (range(end), rest) if end < begin else (range(len(home.instructions)),)
    for i, op in enumerate(home.instructions):
        if op.opcode == "while" and home[op.operands[0]].opcode == "tuple":
            elements = home[op.operands[0]].operands
            if any(_origin(home, x)[0] is start for x in elements):
                # It ends in the loop's first iteration; what it hides of that is not
                # credited to it.
                return (range(begin, i),)
    raise _unpaired(start, "is started and never waited for")


def _origin(home: Computation, name: str) -> tuple[Instruction, int]:
    """What made the value `name`, and which element of its tuple it is."""
    op, place = home[name], -1
    while True:
        if op.opcode == "get-tuple-element":
            place = int(op.attributes["index"])
        elif op.opcode == "tuple" and place >= 0:
            op, place = home[op.operands[place]], -1
            continue
        elif not (op.opcode in _SAME or op.opcode.endswith("-update")):
            return op, place
        op = home[op.operands[0]]


def _handed_on(body: Computation, place: int) -> Instruction:
    """What made the element of a loop's tuple that the next iteration gets."""
    if body.root.opcode != "tuple" or not 0 <= place < len(body.root.operands):
        return body.root
    return _origin(body, body.root.operands[place])[0]


def _base(op: Instruction) -> str:
    for suffix in ("-start", *_WAITS):
        if op.opcode.endswith(suffix):
            return op.opcode.removesuffix(suffix)
    return op.opcode


def _is_start(op: Instruction) -> bool:
    return op.opcode.endswith("-start") or op.opcode in ("send", "recv")


def _is_synchronous(start: Instruction, op: Instruction) -> bool:
    return any('"is_sync":true' in x.backend_config for x in (start, op))


def _unpaired(op: Instruction, why: str) -> ValueError:
    return ValueError(
        "`program` must start each collective and wait for it in one computation or"
        f" one loop; this {why}:\n{op.line[:300]}"
    )

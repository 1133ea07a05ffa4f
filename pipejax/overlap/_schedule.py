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
- an exchange between TPU slices: from its `send` to the `recv-done` of its `recv`
"""

from typing import NamedTuple

from . import _slices
from ._collectives import COLLECTIVES, is_collective, kind_of
from ._hlo import Computation, Instruction, Module, not_understood

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
_SAME = ("bitcast", "copy", "opt-barrier")
# A collective may be wrapped in these, as a kernel or asynchronously.
_WRAPPERS = ("call", "custom-call", "fusion")


class Span(NamedTuple):
    """A collective in the schedule of one computation.

    Attributes:
      name: of the instruction that begins it; of several that begin together, also its
        own.
      start: the instruction that begins it.
      op: the collective: `start` itself, or what is wrapped in it.
      home: the computation of `op`.
      at: place of `start` in the schedule.
      stretches: of the schedule, that it is under way in; none if it is synchronous.
    """

    name: str
    start: Instruction
    op: Instruction
    home: Computation
    at: int
    stretches: tuple[range, ...]

    @property
    def kind(self) -> str:
        """One of `COLLECTIVES`."""
        return kind_of(self.op)


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
            held = self.collectives_of(start, home)
            for op, inside in held:
                if start.opcode == "fusion":
                    stretches = fused.get((at, op.name))
                elif not _is_start(start) or _is_synchronous(start, op):
                    stretches = ()
                else:
                    stretches = _stretches(at, home, here, above)
                if stretches is not None:
                    name = start.name if len(held) == 1 else f"{start.name}/{op.name}"
                    found.append(Span(name, start, op, inside, at, stretches))
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
            op.refuse(
                f"{op.opcode!r} may hide a collective: what is asynchronous must be"
                f" one, or one of {', '.join(sorted(_ASYNC))}"
            )
        # A call in the schedule itself is walked into, as loops and branches are.
        if op.opcode == "call" or not (op.opcode in _WRAPPERS or _is_start(op)):
            return []
        return self._wrapped(op)

    def _wrapped(self, op: Instruction) -> list[tuple[Instruction, Computation]]:
        """Finds the collectives in the computations that `op` runs."""
        found = []
        for name in op.calls:
            inside = self.module.computations[name]
            for x in inside.instructions:
                calls = x.opcode == "call"
                held = self._wrapped(x) if calls else self.collectives_of(x, inside)
                found += held
            if found:
                self.seen.add(name)
        return found

    def _ends(self, home: Computation) -> tuple[dict[str, int], dict[str, int]]:
        """Where each start of `home` is waited for, and where in the next iteration."""
        here: dict[str, int] = {}
        above: dict[str, int] = {}
        for at, op in enumerate(home.instructions):
            if not op.opcode.endswith("-done") or _base(op) in _COPIES:
                continue
            origin, place = _origin(home, op.operand())
            if origin.opcode == "while":
                # The last of a loop, whose others have ended in it.
                body = self.module.computations[origin.attribute("body").strip("%")]
                if _is_start(_handed_on(body, place)):
                    continue
            ends = above if origin.opcode == "parameter" else here
            origin = _handed_on(home, place) if ends is above else origin
            if not _is_start(origin):
                raise _unpaired(op, "is waited for and started nowhere")
            ends[origin.name] = at
        for send in filter(_slices.between_slices, home.instructions):
            # An exchange ends when the device's own result has arrived.
            if send.opcode == "send":
                recv = _other_half(send, home)
                for ends in (here, above):
                    ends.pop(send.name, None)
                    if recv.name in ends:
                        ends[send.name] = ends[recv.name]
        return here, above

    def _fused(self, home: Computation) -> dict[tuple[int, str], tuple[range, ...]]:
        """Finds the stretches of collectives in fusions of `home`.

        They are keyed by the place of the fusion and the name of the collective. A
        fusion that continues or ends what another one began has none.
        """
        found: dict[tuple[int, str], tuple[range, ...]] = {}
        begun: dict[str, tuple[int, str]] = {}
        for at, op in enumerate(home.instructions):
            held = self.collectives_of(op, home) if op.opcode == "fusion" else []
            for one, inside in held:
                channel = one.attributes.get("channel_id", "")
                uses = {x.target for x in inside.instructions if one.name in x.operands}
                if "AsyncCollectiveStart" in uses:
                    if channel in begun:
                        raise _unpaired(op, "is started while it is under way")
                    begun[channel] = at, one.name
                elif "AsyncCollectiveDone" in uses:
                    if channel not in begun:
                        raise _unpaired(op, "is waited for and started nowhere")
                    start = begun.pop(channel)
                    found[start] = (range(start[0] + 1, at),)
                elif channel not in begun:
                    found[at, one.name] = ()
        for at, _ in begun.values():
            raise _unpaired(home.instructions[at], "is started and never waited for")
        return found


def _other_half(send: Instruction, home: Computation) -> Instruction:
    """Finds the `recv` of an exchange between slices."""
    key = _slices.rendezvous(send)
    for op in filter(_slices.between_slices, home.instructions):
        if op.opcode == "recv" and _slices.rendezvous(op) == key:
            return op
    send.refuse("no `recv` in its computation has the same rendezvous")


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
        if op.opcode == "while" and home[op.operand()].opcode == "tuple":
            elements = home[op.operand()].operands
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
            place = op.index
        elif op.opcode == "tuple" and place >= 0:
            op, place = home[op.operand(place)], -1
            continue
        elif not (op.opcode in _SAME or op.opcode.endswith("-update")):
            return op, place
        op = home[op.operand()]


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
    configs = (x.config.get("collective_backend_config") for x in (start, op))
    return any(isinstance(x, dict) and x.get("is_sync") is True for x in configs)


def _unpaired(op: Instruction, why: str) -> ValueError:
    return not_understood(
        op.line,
        "a collective must be started and waited for in one computation or one loop,"
        f" and this {why}",
    )

"""Finds the instructions that run while each collective is in progress.

A collective is in progress from the instruction that hands over its operands to the
instruction that waits for its result. XLA's backends write these two ends in the
following forms:

- `all-reduce`, or a start with `"is_sync":true`: a synchronous collective. Nothing else
  runs while it is in progress.
- `all-reduce-start` ... `all-reduce-done`, and `async-start` ... `async-done`: two
  instructions, and everything that is scheduled between them runs meanwhile.
- `call-start` ... `call-update` ... `call-done`, on the sparse cores of a TPU: the
  collective starts at the update if the update brings the operands.
- Fusions on a TPU v5e: one fusion contains a custom call AsyncCollectiveStart, and a
  later one AsyncCollectiveDone. Fusions between the two that contain the same
  collective continue it while they run compute of their own.
- A start that a loop passes on to its next iteration: the collective is in progress
  from the start to the end of the loop body, and from the top of the body to the done.
- A collective between TPU slices: it is in progress from its `send` to the `recv-done`
  of the `recv` that belongs to it.
"""

from typing import NamedTuple

from . import _slices
from ._collectives import COLLECTIVES, is_collective, kind_of
from ._module import Computation, Instruction, Module, not_understood

# Other instructions that may be asynchronous. They are collectives only if the
# computation that they call contains one.
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
# Instructions that may wrap a collective, either as one kernel or asynchronously.
_WRAPPERS = ("call", "custom-call", "fusion")


class Span(NamedTuple):
    """A collective, and where it is in progress in the schedule of one computation."""

    name: str  # of `start`, and of `op` too if `start` starts several collectives
    start: Instruction
    op: Instruction  # the collective: `start`, or an instruction that `start` wraps
    home: Computation  # the computation that contains `op`
    at: int  # index of `start` in the schedule of its computation
    stretches: tuple[range, ...]  # what runs meanwhile there; empty if synchronous

    @property
    def kind(self) -> str:
        return kind_of(self.op)


class End(NamedTuple):
    """The instruction that waits for a start."""

    at: int  # its index in the schedule
    earlier: bool  # it waits for the start of the previous iteration of a loop


class Finder:
    def __init__(self, module: Module):
        self.module = module
        self.seen: set[str] = set()  # computations that have been searched

    def spans(self, home: Computation) -> list[Span]:
        """Finds the collectives that start in `home`, outside of loops and branches."""
        self.seen.add(home.name)
        ends, fused = self._ends(home), self._fused(home)
        found = []
        for at, start in enumerate(home.instructions):
            held = self.collectives_of(start, home)
            for op, inside in held:
                if start.opcode == "fusion":
                    # `None` for a fusion that continues or ends a collective of an
                    # earlier fusion.
                    stretches = fused.get((at, op.name))
                elif not _is_start(start) or _is_synchronous(start, op):
                    stretches = ()
                else:
                    stretches = _stretches(at, home, ends.get(start.name))
                if stretches is not None:
                    name = start.name if len(held) == 1 else f"{start.name}/{op.name}"
                    found.append(Span(name, start, op, inside, at, stretches))
        return found

    def collectives_of(
        self, op: Instruction, home: Computation
    ) -> list[tuple[Instruction, Computation]]:
        """Returns the collectives that `op` is or wraps, each with its computation."""
        if is_collective(op):
            return [(op, home)]
        # The end of a collective that has been found at its start, or a transfer to the
        # host.
        if _base(op) in COLLECTIVES:
            return []
        if op.opcode.endswith(("-start", *_WAITS)) and _base(op) not in _ASYNC:
            op.refuse(
                f"{op.opcode!r} may hide a collective (known kinds of asynchronous"
                f" instructions are collectives and {', '.join(sorted(_ASYNC))})"
            )
        # `Reading` walks into a plain call, as it walks into loops and branches.
        if op.opcode == "call" or not (op.opcode in _WRAPPERS or _is_start(op)):
            return []
        return self._wrapped(op)

    def _wrapped(self, op: Instruction) -> list[tuple[Instruction, Computation]]:
        found = []
        for name in op.calls:
            inside = self.module.computations[name]
            for x in inside.instructions:
                calls = x.opcode == "call"
                # Inside a kernel, a plain call is a part of it: no walk will come to
                # the call.
                held = self._wrapped(x) if calls else self.collectives_of(x, inside)
                found += held
            if found:
                self.seen.add(name)
        return found

    def _ends(self, home: Computation) -> dict[str, End]:
        """Returns where each start of `home` is waited for, by the start's name."""
        ends: dict[str, End] = {}
        for at, op in enumerate(home.instructions):
            # Copies may be asynchronous too, and are no collectives.
            waits = op.opcode.endswith("-done") and _base(op) not in _COPIES
            if waits and (found := self._started(op, home)):
                ends[found[0].name] = End(at, found[1])
        for send in filter(_slices.between_slices, home.instructions):
            # This collective ends when the device has received its result, not when its
            # `send` is done.
            if send.opcode == "send":
                ends.pop(send.name, None)
                recv = _other_half(send, home).name
                if recv in ends:
                    ends[send.name] = ends[recv]
        return ends

    def _started(
        self, done: Instruction, home: Computation
    ) -> tuple[Instruction, bool] | None:
        """Returns the start that `done` waits for, and whether it is an iteration old.

        Returns `None` if `done` waits for a start in the last iteration of a loop.
        """
        origin, place = _origin(home, done.operand())
        if origin.opcode == "while":
            # The loop body waits for the starts of earlier iterations.
            body = self.module.computations[origin.attribute("body").strip("%")]
            if _is_start(_handed_on(body, place)):
                return None
        # A value that comes with the parameter of a loop body is from the iteration
        # before. The start is what a body hands on at the same place.
        earlier = origin.opcode == "parameter"
        start = _handed_on(home, place) if earlier else origin
        if not _is_start(start):
            raise _unpaired(done, "is waited for and started nowhere")
        return start, earlier

    def _fused(self, home: Computation) -> dict[tuple[int, str], tuple[range, ...]]:
        """Finds the stretches of the collectives in fusions of `home`."""
        found: dict[tuple[int, str], tuple[range, ...]] = {}
        begun: dict[str, tuple[int, str]] = {}
        for at, op in enumerate(home.instructions):
            held = self.collectives_of(op, home) if op.opcode == "fusion" else []
            for one, inside in held:
                # Each fusion has its own copy of the collective. The copies share a
                # channel.
                channel = one.attributes.get("channel_id", "")
                uses = {x.target for x in inside.instructions if one.name in x.operands}
                if "AsyncCollectiveStart" in uses:
                    if channel in begun:
                        raise _unpaired(op, "is started while it is in progress")
                    begun[channel] = at, one.name
                elif "AsyncCollectiveDone" in uses:
                    if channel not in begun:
                        raise _unpaired(op, "is waited for and started nowhere")
                    start = begun.pop(channel)
                    found[start] = (range(start[0] + 1, at),)
                # The fusion has a whole collective, which nothing runs beside. If the
                # channel has begun, the fusion only continues that collective.
                elif channel not in begun:
                    found[at, one.name] = ()
        for at, _ in begun.values():
            raise _unpaired(home.instructions[at], "is started and never waited for")
        return found


def _other_half(send: Instruction, home: Computation) -> Instruction:
    """Finds the `recv` that belongs to the `send` of a collective between slices."""
    key = _slices.rendezvous(send)
    for op in filter(_slices.between_slices, home.instructions):
        if op.opcode == "recv" and _slices.rendezvous(op) == key:
            return op
    send.refuse("no `recv` in its computation has the same rendezvous key")


def _stretches(at: int, home: Computation, end: End | None) -> tuple[range, ...]:
    """Returns the ranges from the start at index `at` to where it is waited for."""
    start, begin, count = home.instructions[at], at + 1, len(home.instructions)
    for i, op in enumerate(home.instructions):
        # A start without operands only prepares the collective. The collective starts
        # at the update that brings the operands.
        brings = op.opcode.endswith("-update") and len(op.operands) > 1
        if brings and not start.operands and op.operands[0] == start.name:
            begin = i + 1
    if end and not end.earlier:
        return (range(begin, end.at),)
    if end:
        # The done waits for the start of the previous iteration.
        # If the done comes before the start, the collective is in progress at both ends
        # of the body. If it comes after the start, there is one in progress at any
        # time.
        both = (range(end.at), range(begin, count))
        return both if end.at < begin else (range(count),)
    for i, op in enumerate(home.instructions):
        if op.opcode == "while" and home[op.operand()].opcode == "tuple":
            elements = home[op.operand()].operands
            if any(_origin(home, x)[0] is start for x in elements):
                # The collective ends in the first iteration of this loop. The compute
                # of that iteration is not counted as running under it.
                return (range(begin, i),)
    raise _unpaired(start, "is started and never waited for")


def _origin(home: Computation, name: str) -> tuple[Instruction, int]:
    """Returns the instruction that computed `name`, and an index into its tuple."""
    # An index of -1 stands for the whole result of the instruction.
    op, place = home[name], -1
    while True:
        if op.opcode == "get-tuple-element":
            place = op.index
        elif op.opcode == "tuple" and place >= 0:
            # The element of this tuple is itself a whole value again.
            op, place = home[op.operand(place)], -1
            continue
        elif not (op.opcode in _SAME or op.opcode.endswith("-update")):
            return op, place
        op = home[op.operand()]


def _handed_on(body: Computation, place: int) -> Instruction:
    """Returns the instruction that computes element `place` of a loop body's result."""
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
        "a collective must be started and waited for in the same computation or loop,"
        f" and this one {why}",
    )

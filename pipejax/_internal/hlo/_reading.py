"""Makes the report on a module by walking its computations in the order they run."""

import collections
import itertools

from pipejax._internal.wire import wire_bytes

from ._collectives import group_size, handed_over, is_collective
from ._device_groups import MeshAxes
from ._flops import Counter, WorkCount
from ._module import Computation, Instruction, Module, not_understood
from ._report import Collective, Item, Report
from ._schedule import Finder, Span

# FLOPs that run while at least one collective is in progress, by the mesh axes of the
# collective. The key `None` stands for any collective.
Covered = collections.defaultdict[tuple[str, ...] | None, float]

_LIGHT = 0.01
"""The smallest collectives, which send less than this share of all bytes together,
cover no FLOPs. Compute beside a few numbers does not show that the gradients are
hidden."""


class Reading:
    """A walk over the computations of a module, in the order they run."""

    def __init__(self, module: Module, axes: MeshAxes | None = None):
        self.module = module
        self.axes = axes
        self.counter = Counter(module)
        self.finder = Finder(module)
        # Found so far. The `share` of a collective is 0 until `report` sets it.
        self.collectives: list[Collective] = []
        self.schedule: list[Item] = []
        # The names of collectives that cover no FLOPs, among those over given axes.
        self.light: dict[tuple[str, ...] | None, set[str]] = {}

    def report(self) -> Report:
        entry = self.module.entry
        total = self.counter.whole(entry.name)
        self._walk(entry, 1, 0)
        self.light = _light(self.collectives)
        self.collectives, self.schedule = [], []
        covered = self._walk(entry, 1, 0)[1]
        self._check_complete()
        flops = total.flops
        by_axis = {axes: x / flops for axes, x in covered.items() if flops}
        collectives = (
            c._replace(share=c.flops / flops if flops else 0.0)
            for c in self.collectives
        )
        return Report(
            program=self.module.name,
            flops=flops,
            matmuls=total.matmuls,
            operations=total.operations,
            collectives=tuple(collectives),
            covered=by_axis.pop(None, None),
            covered_by={axes: x for axes, x in by_axis.items() if axes is not None},
            uncounted=tuple(f"{k}: {v}" for k, v in self.counter.uncounted.items()),
            schedule=tuple(self.schedule),
        )

    def _walk(self, home: Computation, times: int, place: int) -> tuple[int, Covered]:
        """Reads a computation, and the loops, branches and calls in it.

        The program runs `home` so many `times`, and `place` compute items are before it
        in the schedule. Returns the number of compute items before its end, and the
        FLOPs that run while at least one collective is in progress, or one over given
        axes.
        """
        spans = self.finder.spans(home)
        under = self._under(spans)
        covered: Covered = collections.defaultdict(float)
        places: list[int] = []
        for i, op in enumerate(home.instructions):
            # `places[i]` is where instruction i stands in the schedule, counted in
            # compute items. Instructions that are no compute stand where the next
            # compute item does.
            places.append(place)
            self.collectives += [
                self._collective(span, home, times) for span in spans if span.at == i
            ]
            work = self.counter.of(op, home).times(times)
            inside: Covered = collections.defaultdict(float)
            # A loop without collectives is a single item of the schedule.
            if op.opcode in ("while", "call", "conditional") and self._holds(op):
                count = self.counter.trips(op, home) if op.opcode == "while" else 1
                place, inside = self._inner(op, times * count, place)
            elif work.operations:
                kind = "matmul" if work.matmuls else "other"
                self.schedule.append(Item(op.name, kind, work.flops, place, place + 1))
                place += 1
            for axes in under.keys() | inside.keys():
                # If the whole instruction runs under a collective, so does all that is
                # in it. If not, there may still be collectives in it that cover a part.
                whole = i in under.get(axes, ())
                covered[axes] += work.flops if whole else inside[axes]
        places.append(place)
        for span in spans:
            at = places[span.at]
            # A synchronous collective has no length. It is drawn at the place where it
            # starts.
            for part in span.stretches or (range(0),):
                start, end = (
                    (places[part.start], places[part.stop]) if part else (at,) * 2
                )
                item = Item(span.name, span.kind, 0.0, start, end)
                self.schedule.append(item)
        return place, covered

    def _under(self, spans: list[Span]) -> dict[tuple[str, ...] | None, set[int]]:
        """Returns the instructions that run during collectives, by their mesh axes."""
        under: dict[tuple[str, ...] | None, set[int]] = {None: set()}
        for span in spans:
            running = {i for stretch in span.stretches for i in stretch}
            keys = [None] if self.axes is None else [None, self.axes.of(span.op)]
            for axes in keys:
                counts = span.name not in self.light.get(axes, ())
                under.setdefault(axes, set()).update(running if counts else ())
        return under

    def _inner(self, op: Instruction, times: int, place: int) -> tuple[int, Covered]:
        """Walks the computations that a loop, call or conditional runs; see `_walk`."""
        if op.opcode != "conditional":
            covered: Covered = collections.defaultdict(float)
            for name in op.calls:
                home = self.module.computations[name]
                place, inside = self._walk(home, times, place)
                for axes, flops in inside.items():
                    covered[axes] += flops
            return place, covered
        # All branches are searched for collectives. Only the branch with the most work
        # is drawn and counted, as in the total of the FLOPs.
        largest, drawn = max(op.calls, key=self.counter.whole), self.schedule
        for name in op.calls:
            self.schedule = drawn if name == largest else []
            end, inside = self._walk(self.module.computations[name], times, place)
            if name == largest:
                result = end, inside
        self.schedule = drawn
        return result

    def _collective(self, span: Span, home: Computation, times: int) -> Collective:
        """Returns the numbers of one collective, without its share of all FLOPs."""
        beside = [home.instructions[i] for part in span.stretches for i in part]
        # Work in a loop inside the stretch counts with all its iterations.
        once = sum((self.counter.of(op, home) for op in beside), WorkCount())
        work = once.times(times)
        shapes = handed_over(span.op, span.home)
        devices = group_size(span.op, self.module)
        payload = sum((shape.bytes for shape in shapes), 0.0)
        return Collective(
            name=span.name,
            kind=span.kind,
            dtypes=tuple(dict.fromkeys(shape.dtype for shape in shapes)),
            group_size=devices,
            bytes=payload,
            wire_bytes=wire_bytes(span.kind, devices, payload),
            asynchronous=bool(span.stretches),
            operations=work.operations,
            matmuls=work.matmuls,
            flops=work.flops,
            share=0.0,
            times=times,
            op_name=span.op.op_name or span.start.op_name,
            axes=None if self.axes is None else self.axes.of(span.op),
        )

    def _holds(self, op: Instruction) -> bool:
        homes = [self.module.computations[name] for name in op.calls]
        return any(
            is_collective(x) or self._holds(x)
            for home in homes
            for x in home.instructions
        )

    def _check_complete(self) -> None:
        """Raises a `ValueError` if the walk has passed over a collective."""
        for name, home in self.module.computations.items():
            missed = [op for op in home.instructions if is_collective(op)]
            if missed and name not in self.finder.seen:
                raise not_understood(
                    missed[0].line,
                    f"it is a collective in {name}, which no loop, branch, fusion or"
                    " asynchronous instruction of the schedule calls",
                )


def _light(found: list[Collective]) -> dict[tuple[str, ...] | None, set[str]]:
    """Returns the names of light collectives, among all and among those over axes."""
    sent: dict[tuple[str, ...] | None, dict[str, float]] = {}
    for each in found:
        for axes in {None, each.axes}:
            names = sent.setdefault(axes, collections.defaultdict(float))
            names[each.name] += each.times * each.wire_bytes
    return {axes: _smallest(names) for axes, names in sent.items()}


def _smallest(sent: dict[str, float]) -> set[str]:
    """Returns the names that send the fewest bytes, in all less than `_LIGHT`."""
    names = sorted(sent, key=lambda name: sent[name])
    sums = itertools.accumulate(sent[name] for name in names)
    limit = _LIGHT * sum(sent.values())
    return {name for name, bytes in zip(names, sums, strict=True) if bytes < limit}

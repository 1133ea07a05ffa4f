"""From a program to a report on what hides its communication."""

from typing import Any

import jax

from ._flops import Counter, Work
from ._hlo import Computation, Instruction, Module, group_size, parse
from ._report import Collective, Item, Report, wire_bytes
from ._schedule import Finder, Span, is_collective


def inspect(
    program: Any, *args: Any, compiler_options: dict[str, Any] | None = None
) -> Report:
    """Reads in a program's schedule what runs while its collectives are under way.

    For a collective c that hides `f_c` of the program's `f` FLOPs, `share_c = f_c / f`;
    the report's `share` is their mean, weighted by bytes. It costs a compilation at
    most, runs nothing, and works for devices that are not there.

    Args:
      program: a `jax.stages.Compiled` or `Lowered`, the text of scheduled HLO, or what
        has a method `lower`: a jitted function, a `pj.TrainStep`.
      *args: what to lower `program` for, arrays or `jax.ShapeDtypeStruct`s; only where
        it is to be lowered.
      compiler_options: to compile with; `None` takes those of `program` if it has an
        attribute of that name, as a `pj.TrainStep` does.

    Returns:
      A `Report`: print it, or `report.plot("schedule.png")`.

    Raises:
      ValueError: for what is no program, no HLO, or HLO without a schedule; and for
        instructions that may be collectives and are not understood.

    >>> step = jax.jit(lambda x: x @ x)
    >>> report = inspect(step, jax.ShapeDtypeStruct((8, 8), "float32"))
    >>> report.flops, len(report.collectives)
    (1024.0, 0)
    """
    text = _text(program, args, compiler_options)
    if not text.strip().startswith("HloModule"):
        raise ValueError(
            "`program` must be HLO text, which begins with `HloModule`; got"
            f" {text.strip()[:40]!r}. Pass what `Compiled.as_text()` returns."
        )
    module = parse(text.strip())
    if not module.is_scheduled:
        raise ValueError(
            "`program` must be scheduled, its header with `is_scheduled=true`; got"
            f" {module.name} without. Compile it: `lowered.compile().as_text()`, not"
            " `lowered.as_text()`."
        )
    return _Reading(module).report()


def _text(program: Any, args: tuple[Any, ...], options: dict[str, Any] | None) -> str:
    """The HLO of `program`, compiled if it is not yet."""
    if isinstance(program, str | jax.stages.Compiled) and options is not None:
        raise ValueError(
            "`compiler_options` must be left out for a program that is compiled"
            f" already, got {options}. Pass the lowered program instead."
        )
    if isinstance(program, str | jax.stages.Compiled | jax.stages.Lowered) and args:
        raise ValueError(
            f"`args` must be left out for a program that is lowered already, got"
            f" {len(args)} of them."
        )
    if isinstance(program, str):
        return program
    if not isinstance(program, jax.stages.Compiled | jax.stages.Lowered):
        if not hasattr(program, "lower"):
            got = getattr(program, "__name__", type(program).__name__)
            raise ValueError(
                "`program` must be compiled, lowered, HLO text, or have a method"
                f" `lower`; got {got}. If it is a function: `inspect(jax.jit({got}),"
                " *args)`."
            )
        if options is None:
            options = getattr(program, "compiler_options", None)
        program = program.lower(*args)
    if isinstance(program, jax.stages.Lowered):
        program = program.compile(compiler_options=options or None)
    return program.as_text() or ""


class _Reading:
    """One walk over a module's computations, in the order they run."""

    def __init__(self, module: Module):
        self.module = module
        self.counter = Counter(module)
        self.finder = Finder(module)
        self.collectives: list[Collective] = []
        self.schedule: list[Item] = []

    def report(self) -> Report:
        entry = self.module.entry
        total = self.counter.whole(entry.name)
        covered = self._walk(entry, 1, 0)[1]
        self._check_complete()
        by_share = (
            c._replace(share=c.flops / total.flops if total.flops else 0.0)
            for c in self.collectives
        )
        return Report(
            program=self.module.name,
            flops=total.flops,
            matmuls=total.matmuls,
            collectives=tuple(by_share),
            covered=covered / total.flops if total.flops else None,
            uncounted=tuple(f"{k}: {v}" for k, v in self.counter.uncounted.items()),
            schedule=tuple(self.schedule),
        )

    def _walk(self, home: Computation, times: int, place: int) -> tuple[int, float]:
        """Reads `home`, which runs `times` times.

        Args:
          home: a computation.
          times: its executions.
          place: compute items before it.

        Returns:
          Compute items before its end, and the FLOPs that run under a collective.
        """
        spans = self.finder.spans(home)
        under = {i for span in spans for stretch in span.stretches for i in stretch}
        covered, places = 0.0, []
        for i, op in enumerate(home.instructions):
            places.append(place)
            self.collectives += [
                self._collective(span, home, times) for span in spans if span.at == i
            ]
            work = self.counter.of(op, home).times(times)
            inside = 0.0
            if op.opcode in ("while", "call", "conditional") and self._holds(op):
                count = self.counter.trips(op, home) if op.opcode == "while" else 1
                place, inside = self._inner(op, times * count, place)
            elif work.operations:
                kind = "matmul" if work.matmuls else "other"
                self.schedule.append(Item(op.name, kind, work.flops, place, place + 1))
                place += 1
            covered += work.flops if i in under else inside
        places.append(place)
        for span in spans:
            at = places[span.at]
            for part in span.stretches or (range(0),):
                start, end = (
                    (places[part.start], places[part.stop]) if part else (at,) * 2
                )
                item = Item(span.start.name, span.kind, 0.0, start, end)
                self.schedule.append(item)
        return place, covered

    def _inner(self, op: Instruction, times: int, place: int) -> tuple[int, float]:
        """As `_walk`, for a loop, call or conditional, of which the largest branch."""
        if op.opcode != "conditional":
            covered = 0.0
            for name in op.calls:
                home = self.module.computations[name]
                place, inside = self._walk(home, times, place)
                covered += inside
            return place, covered
        largest, drawn = max(op.calls, key=self.counter.whole), self.schedule
        for name in op.calls:
            self.schedule = drawn if name == largest else []
            end, inside = self._walk(self.module.computations[name], times, place)
            if name == largest:
                result = end, inside
        self.schedule = drawn
        return result

    def _collective(self, span: Span, home: Computation, times: int) -> Collective:
        """The numbers of one collective, its share still to come."""
        beside = [home.instructions[i] for part in span.stretches for i in part]
        work = sum((self.counter.of(op, home) for op in beside), Work()).times(times)
        operands = span.op.operands
        if span.kind == "ragged-all-to-all":  # The others say where and how much.
            operands = operands[:1]
        shapes = span.home.shapes_of(operands)
        if span.kind == "recv":
            shapes = list(span.op.shapes[:1])
        shapes = [shape for shape in shapes if shape.bytes]
        devices = group_size(span.op, self.module)
        payload = sum(shape.bytes for shape in shapes)
        return Collective(
            name=span.start.name,
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
        )

    def _holds(self, op: Instruction) -> bool:
        """Whether a collective is in what `op` runs, however deep."""
        homes = [self.module.computations[name] for name in op.calls]
        return any(
            is_collective(x) or self._holds(x)
            for home in homes
            for x in home.instructions
        )

    def _check_complete(self) -> None:
        """No collective was passed over."""
        for name, home in self.module.computations.items():
            missed = [op for op in home.instructions if is_collective(op)]
            if missed and name not in self.finder.seen:
                raise ValueError(
                    "`program` must call its collectives from its schedule, its loops,"
                    f" branches, fusions or asynchronous calls; got one in {name},"
                    f" which nothing of these calls:\n{missed[0].line[:300]}"
                )

"""From a program to a report on what hides its communication."""

from typing import Any

import jax

from ._memory import Memory
from ._parse import parse
from ._reading import Reading
from ._report import Report


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
      A `Report`: print it, or draw it with `timeline(report, "schedule.png")`.

    Raises:
      ValueError: for what is no program, no HLO, or HLO without a schedule; and for
        instructions that may be collectives and are not understood.

    >>> step = jax.jit(lambda x: x @ x)
    >>> report = inspect(step, jax.ShapeDtypeStruct((8, 8), "float32"))
    >>> report.flops, len(report.collectives)
    (1024.0, 0)
    """
    program = _compiled(program, args, compiler_options)
    text = program if isinstance(program, str) else program.as_text() or ""
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
    report = Reading(module).report()
    known = isinstance(program, jax.stages.Compiled)
    return report._replace(memory=Memory.of(program) if known else None)


def _compiled(program: Any, args: tuple[Any, ...], options: Any) -> Any:
    """Returns HLO text as it is, and all else compiled."""
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
        return program.compile(compiler_options=options or None)
    return program

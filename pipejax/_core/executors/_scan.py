"""Makes a `lax.scan` an operation that can be cut: L iterations are k, then L - k."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from pipejax._internal.jaxpr import scan_parts
from pipejax._internal.types import JaxprEqn

from ._flops import flops_of


class TracedOperation(NamedTuple):
    """An operation of a program, with unique names for what it reads and writes.

    Attributes:
      halves: Function that cuts the operation in two, at about the given fraction of
        its work. `None` if the operation cannot be cut.
      cheap: Whether it is better to run the operation twice than to keep its results.
      large: Those names of `reads` whose arrays are not small beside the results. Only
        a cheap operation has them.
    """

    flops: float
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    run: Callable[..., Sequence[Any]]
    halves: Callable[[float], list["TracedOperation"]] | None = None
    cheap: bool = False
    large: tuple[Any, ...] = ()


def scan_operation(
    equation: JaxprEqn, reads: tuple[Any, ...], writes: tuple[Any, ...]
) -> TracedOperation:
    """Returns the scan of an equation as an operation."""
    params = equation.params
    length, body = params["length"], core.jaxpr_as_fun(params["jaxpr"])
    # The results are the carry and stacked arrays.
    fixed, carried, along = scan_parts(equation)
    mesh = equation.ctx.cur_abstract_mesh  # whose axis types the operands have

    def part(start: int, stop: int, reads: Any, writes: Any) -> TracedOperation:
        """Returns the operation of the iterations from `start` to `stop`.

        Unless it is the first part, it also reads the stacked results of the iterations
        before, and puts its own beside them.
        """

        def run(*values: Any) -> Sequence[Any]:
            with jax.sharding.use_abstract_mesh(mesh):
                return iterations(*values)

        def iterations(*values: Any) -> Sequence[Any]:
            consts, state, xs, done = _split(values, fixed, carried, along)

            def one(state: Any, x: Any) -> Any:
                out = body(*consts, *state, *x)
                return list(out[:carried]), list(out[carried:])

            # A reversed scan takes its iterations from the end of the stacked arrays.
            rows = slice(start, stop)
            if params["reverse"]:
                rows = slice(length - stop, length - start)
            state, ys = lax.scan(
                one,
                list(state),
                [x[rows] for x in xs],
                length=stop - start,
                reverse=params["reverse"],
                unroll=params.get("unroll", 1),
            )
            # The stacked results of both parts lie in the order of the iterations.
            if done:
                order = -1 if params["reverse"] else 1
                pairs = zip(done, ys, strict=True)
                ys = [jnp.concatenate(pair[::order]) for pair in pairs]
            return [*state, *ys]

        def halves(fraction: float) -> list[TracedOperation]:
            # At least one iteration stays on either side.
            k = start + round(fraction * (stop - start))
            k = min(max(k, start + 1), stop - 1)
            middle = tuple(object() for _ in writes)
            consts, _, xs, _ = _split(reads, fixed, carried, along)
            # The second part reads the same constants and stacked inputs, the carry of
            # the first part, and the rows that it has stacked.
            after = (*consts, *middle[:carried], *xs, *middle[carried:])
            return [part(start, k, reads, middle), part(k, stop, after, writes)]

        work = flops_of(equation) * (stop - start) / max(length, 1)
        return TracedOperation(
            work, reads, writes, run, halves if stop - start > 1 else None
        )

    return part(0, length, reads, writes)


def _split(values: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    parts = []
    for count in counts:
        parts.append(values[:count])
        values = values[count:]
    return [*parts, values]

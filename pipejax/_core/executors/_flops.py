"""Counts the FLOPs of the matmuls and convolutions in a traced program.

The count is good enough to cut a program into equal parts. `pj.overlap.inspect` counts
the FLOPs of the program that XLA makes of it.
"""

import math
from typing import Any

from pipejax._internal.jaxpr import programs_in
from pipejax._internal.types import JaxprEqn


def flops_of(equation: JaxprEqn) -> float:
    """Returns the FLOPs of one equation, two for each multiplication.

    A scan and a Pallas kernel count with all their iterations, a `while` loop with one
    iteration, and a conditional with its largest branch.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2 * _size(equation.outvars[0]) * math.prod(lhs[i] for i in contracted)
    if name == "conv_general_dilated":
        _, *others = params["dimension_numbers"].rhs_spec  # without output features
        kernel = equation.invars[1].aval.shape
        taps = math.prod(kernel[axis] for axis in others)
        return 2 * _size(equation.outvars[0]) * taps
    if name == "ragged_dot_general":
        return _ragged_dot(equation)
    inner = [sum(map(flops_of, program.eqns)) for program in programs_in(equation)]
    if name == "cond":
        return max(inner, default=0.0)
    return _repeats(equation) * sum(inner)


def _ragged_dot(equation: JaxprEqn) -> float:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    lhs, _, groups = (var.aval.shape for var in equation.invars[:3])
    flops = 2 * _size(equation.outvars[0]) * math.prod(lhs[i] for i in contracted)
    # If the ragged dimension is contracted, there is a result for each group, which
    # sums over the rows of the group alone.
    ragged = not {*numbers.lhs_ragged_dimensions}.isdisjoint(contracted)
    return flops / groups[-1] if ragged else flops


def _repeats(equation: JaxprEqn) -> int:
    """Returns how many times an equation runs its program."""
    if equation.primitive.name == "pallas_call":
        grid = equation.params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    return equation.params["length"] if equation.primitive.name == "scan" else 1


def _size(variable: Any) -> float:
    return float(math.prod(variable.aval.shape))

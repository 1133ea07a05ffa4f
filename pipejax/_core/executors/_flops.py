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

    A scan counts with all its iterations, a `while` loop with one iteration, and a
    conditional with its largest branch.
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
    inner = [sum(map(flops_of, program.eqns)) for program in programs_in(equation)]
    if name == "cond":
        return max(inner, default=0.0)
    return params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)


def _size(variable: Any) -> float:
    return float(math.prod(variable.aval.shape))

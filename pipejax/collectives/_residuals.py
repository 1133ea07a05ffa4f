"""What error feedback has yet to send, in the shapes of the gradients, and back.

Residuals lie where an algorithm encodes, in pieces that depend on the algorithm and on
the number of devices. The algorithm itself knows where:

- given zeros, with codecs that send all they have, it sums whatever was kept
- given arrays, with codecs that send nothing, it keeps those arrays
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.codecs import Codec, ErrorFeedbackState, passing
from pipejax.mesh import AxisName

from ._all_reduce import AllReduce
from ._layout import Layout, Summands
from ._stages import Stages, States, run


def owed(
    all_reduce: AllReduce, layout: Layout, axis_name: AxisName, states: States
) -> tuple[jax.Array, ...]:
    """Returns the sum over devices of what they have yet to send.

    Args:
      all_reduce: which has kept it.
      layout: of the arrays it sums.
      axis_name: over which axes.
      states: each device's own.

    Returns:
      Arrays in the shapes of the gradients and in the layout's `working_dtype`, the
      same on all devices.
    """
    stages = _passing(all_reduce, layout, axis_name, passes=True)
    # Each device's own: of what all share, vmap exchanges nothing, or the wrong thing.
    zero = (0 * lax.axis_index(axis_name)).astype(layout.working_dtype)
    zeros = tuple(jnp.full(x.shape, zero) for x in layout.coded)
    total, _ = run(stages, Summands(zeros), stages.init() | _residuals(states))
    return total.coded


def owing(
    all_reduce: AllReduce,
    layout: Layout,
    axis_name: AxisName,
    states: States,
    arrays: tuple[jax.Array, ...],
) -> States:
    """Returns the states, with `arrays` to be sent by this device and nothing else.

    Args:
      all_reduce: which is to send them.
      layout: of the arrays it sums.
      axis_name: over which axes.
      states: this device's own, whose keys and warm starts stay.
      arrays: in the shapes of the gradients and in the layout's `working_dtype`.
    """
    stages = _passing(all_reduce, layout, axis_name, passes=False)
    _, kept = run(stages, Summands(arrays), stages.init())
    new = {
        name: states[name]._replace(residual=residual.residual)
        for name, residual in _residuals(kept).items()
    }
    return states | new


def _passing(
    all_reduce: AllReduce, layout: Layout, axis_name: AxisName, *, passes: bool
) -> Stages:
    """Returns the algorithm, its codecs with feedback sending all or nothing."""

    def change(part: Any) -> Any:
        if isinstance(part, Codec):
            return passing(part, passes=passes)
        if isinstance(part, AllReduce):
            names = [field.name for field in dataclasses.fields(part)]
            parts = {name: change(getattr(part, name)) for name in names}
            return dataclasses.replace(part, **parts)
        return part

    return change(all_reduce)(layout.widened(), axis_name)


def _residuals(states: States) -> States:
    """Of the states those of feedback, without what the codecs inside keep."""
    return {
        name: state._replace(codec=())
        for name, state in states.items()
        if isinstance(state, ErrorFeedbackState)
    }

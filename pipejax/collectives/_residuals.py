"""Residuals of error feedback, read and written in the shapes of the gradients.

An algorithm keeps residuals wherever it encodes, in pieces that depend on the algorithm
and on the number of devices. To read or write them, the functions here run the
algorithm itself, with other codecs inside its error feedback:

- `owed` runs the algorithm on zeros, with codecs that send everything. The result is
  the sum of all residuals.
- `owing` runs the algorithm on given arrays, with codecs that send nothing. The arrays
  become the residuals.
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
    """Returns the sum of all residuals over devices.

    Args:
      all_reduce: The algorithm that keeps the residuals.
      layout: Layout of the arrays that the algorithm sums.
      axis_name: Axis or axes that the algorithm sums over.
      states: States of the codecs on this device.

    Returns:
      Arrays in the shapes of the gradients and in the `working_dtype` of the layout,
      the same on all devices.
    """
    stages = _passing(all_reduce, layout, axis_name, passes=True)
    # The zeros depend on the rank, because under `jax.vmap` a collective is skipped, or
    # wrong, for a value that all rows share.
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
    """Returns the states with `arrays` as the residuals of this device.

    All residuals that the device had before are replaced. Keys and warm starts of the
    codecs stay.

    Args:
      all_reduce: The algorithm that will send the residuals.
      layout: Layout of the arrays that the algorithm sums.
      axis_name: Axis or axes that the algorithm sums over.
      states: States of the codecs on this device.
      arrays: What this device still has to send, in the shapes of the gradients and in
        the `working_dtype` of the layout.
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
    """Returns the stages of the algorithm with codecs that send everything or nothing.

    Args:
      all_reduce: The algorithm.
      layout: Layout of the arrays that the algorithm sums.
      axis_name: Axis or axes that the algorithm sums over.
      passes: Whether codecs with error feedback send everything. Codecs without error
        feedback always do.
    """

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
    """Returns the states of error feedback, without those of the codecs inside."""
    return {
        name: state._replace(codec=())
        for name, state in states.items()
        if isinstance(state, ErrorFeedbackState)
    }

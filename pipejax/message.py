"""What one device sends each step, in buckets, and the sum of it over devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .buckets import Buckets, all_finite
from .collectives import AllReduce, Layout, Stages, run
from .mesh import AxisName


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """What a message holds, known while tracing.

    Attributes:
      layouts: bucket, and what is in it, for each.
      checked: bucket, and how many elements at its front must be finite in sum.
    """

    layouts: tuple[tuple[str, Layout], ...]
    checked: tuple[tuple[str, int], ...]

    def reductions(
        self, all_reduce: AllReduce, axis_name: AxisName
    ) -> dict[str, Stages]:
        """The stages that sum each bucket."""
        return {name: all_reduce(layout, axis_name) for name, layout in self.layouts}


def summed(
    reductions: dict[str, Stages], buckets: Buckets, states: Any
) -> tuple[Buckets, Any]:
    """The sums, with nothing beside, and the codecs' states after them."""
    return parted({k: run(reductions[k], x, states[k]) for k, x in buckets.items()})


def parted(results: dict[str, tuple[jax.Array, Any]]) -> tuple[Buckets, Any]:
    """Sums and states of all buckets, apart."""
    sums = {name: total for name, (total, _) in results.items()}
    return sums, {name: states for name, (_, states) in results.items()}


def fed_back(
    form: MessageForm, total: Buckets, arrived: Any, new: Any, old: Any
) -> Any:
    """The codecs' states after a message: as before it, if it is not applied.

    Args:
      form: of the message.
      total: its sum, which all devices have.
      arrived: bool scalar, whether it is one, and not only zeros of the start.
      new: the states after it.
      old: the states before it.
    """
    if not jax.tree.leaves(new):
        return new
    applied = arrived & all_finite(total, dict(form.checked))
    return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

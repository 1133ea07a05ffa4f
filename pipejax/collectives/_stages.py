"""An all-reduce as a sequence of stages.

A stage is local work, then one collective. What is local at the end is `finish`.

- `psum`: one stage, nothing local
- two-shot: encode, all_to_all | decode and sum, encode, all_gather | decode
- ring: 2(p-1) stages, each encode, ppermute

Whoever runs it may put compute between the stages, and so hide each of them: a chain of
dependent collectives in one place hides only its last link.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax


class Stages(NamedTuple):
    """The sum of one vector over an axis, to be run in order.

    Attributes:
      stages: each takes what the one before returned, the first this device's vector
        [n], and ends with one collective.
      finish: what the last returned -> the sum [n], the same bits on every device.
    """

    stages: tuple[Callable[[Any], Any], ...]
    finish: Callable[[Any], jax.Array]


class AllReduce(Protocol):
    """An algorithm: from what is to be summed to the stages that do it."""

    def __call__(
        self, like: jax.ShapeDtypeStruct, axis_name: str, exact: int = 0
    ) -> Stages:
        """The stages for a vector.

        Args:
          like: its shape [n] and dtype.
          axis_name: the axis of the surrounding `shard_map` to sum over.
          exact: how many elements at its end must not be compressed.
        """
        ...


def run(stages: Stages, vector: jax.Array) -> jax.Array:
    """All stages at once, with nothing between them."""
    payload: Any = vector
    for stage in stages.stages:
        payload = stage(payload)
    return stages.finish(payload)

"""The interface of an executor."""

from typing import Any, Protocol

import jax
from jax.sharding import Mesh


class Executor(Protocol):
    """Runs the steps of a `StepConfig`.

    `choose` returns one of the executors. A state can go from one executor to another.
    """

    @property
    def name(self) -> str:
        """Returns `"fused"` or `"host"`, as `make_train_step` takes it."""
        ...

    @property
    def reason(self) -> str:
        """Returns why the executor was chosen."""
        ...

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the compiler options of the executor's programs."""
        ...

    @property
    def reduction_mesh(self) -> Mesh:
        """Returns the devices that sum messages and hold the codec states."""
        ...

    def step(self, state: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Takes one step.

        Args:
          state: The shared part of the train state.
          in_flight: The messages in flight.
          batch: The global batch.

        Returns:
          The new state, the new messages in flight, and the info of the step.
        """
        ...

    def drain(self, state: Any, in_flight: Any) -> tuple[Any, Any, Any]:
        """Applies all messages in flight, in order.

        Args:
          state: The shared part of the train state.
          in_flight: The messages in flight.

        Returns:
          The new state, a queue with nothing in flight, and an info for each place in
          the queue.
        """
        ...

    def lower(self, state: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the lowered program in which a step computes.

        Args:
          state: The shared part of the train state, or its shapes.
          in_flight: The messages in flight, or their shapes.
          batch: The global batch, or its shapes.
        """
        ...

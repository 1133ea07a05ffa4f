"""The interface of an executor."""

from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from pipejax._core.step import Batch, PipelineState, StepInfo

from ._config import StepConfig


class Executor(Protocol):
    """Runs the steps of a `StepConfig`.

    `choose` returns one of the executors. A state can go from one executor to another.
    """

    @property
    def config(self) -> StepConfig:
        """Returns the configuration of the steps."""
        ...

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

    def step(
        self, state: PipelineState, batch: Batch
    ) -> tuple[PipelineState, StepInfo]:
        """Takes one step, and returns the next state and the info of the step."""
        ...

    def drain(self, state: PipelineState) -> tuple[PipelineState, tuple[StepInfo, ...]]:
        """Applies all messages in flight, in order."""
        ...

    def lower(self, state: PipelineState, batch: Batch) -> jax.stages.Lowered:
        """Returns the lowered program in which a step computes."""
        ...

"""The executor `Auto`, which changes from `Host` to `Fused` if a program requires it.

The host executor hides communication between CPUs of several processes, but only if
neither the loss nor the optimizer has a collective between processes. This is known
when the first step is compiled. Every process compiles the same programs, and so
chooses the same executor.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from pipejax._core.step import Batch, PipelineState, StepInfo

from ._config import StepConfig
from ._executor import Executor
from ._fused import Fused
from ._host import Host
from ._own_collectives import OwnCollectiveError


class Auto:
    """Executor that runs steps as `Host` does, and if necessary as `Fused` does.

    It changes to `Fused`, and never back, when it finds that the loss or the optimizer
    has a collective between processes.
    """

    def __init__(self, config: StepConfig, reason: str) -> None:
        self.config = config
        self._now: Executor = Host(config, reason)

    @property
    def name(self) -> str:
        """Returns the name of the executor in use."""
        return self._now.name

    @property
    def reason(self) -> str:
        """Returns why the executor in use was chosen."""
        return self._now.reason

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the compiler options of the executor in use."""
        return self._now.compiler_options

    @property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh of the step, which consists of CPUs."""
        return self._now.reduction_mesh

    def step(
        self, state: PipelineState, batch: Batch
    ) -> tuple[PipelineState, StepInfo]:
        """Takes one step, if necessary after a change to `Fused`."""
        try:
            return self._now.step(state, batch)
        except OwnCollectiveError as error:
            self._fuse(error)
        return self._now.step(state, batch)

    def drain(self, state: PipelineState) -> tuple[PipelineState, tuple[StepInfo, ...]]:
        """Applies everything in flight, if necessary after a change to `Fused`."""
        try:
            return self._now.drain(state)
        except OwnCollectiveError as error:
            self._fuse(error)
        return self._now.drain(state)

    def lower(self, state: PipelineState, batch: Batch) -> jax.stages.Lowered:
        """Returns the lowered program in which a step computes."""
        return self._now.lower(state, batch)

    def _fuse(self, error: OwnCollectiveError) -> None:
        """Changes to the fused executor, which reduces all messages in flight anew."""
        self._now = Fused(self.config, error.reason)

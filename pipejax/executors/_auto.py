"""The executor that fits a program, once the program is known.

The host executor hides communication between CPUs of several processes, but only if
neither the loss nor the optimizer has a collective between processes. That is known
when the first step is compiled. Every process compiles the same programs, and so
chooses the same executor.
"""

from typing import Any

import jax
from jax.sharding import Mesh

from ._config import StepConfig
from ._executor import Executor
from ._fused import Fused
from ._host import Host
from ._own_collectives import OwnCollectiveError


class Auto:
    """Runs steps as `Host` does, from a collective of the loss's own on as `Fused`."""

    def __init__(self, config: StepConfig, reason: str) -> None:
        self._config = config
        self._now: Executor = Host(config, reason)

    @property
    def name(self) -> str:
        """That of the executor in use."""
        return self._now.name

    @property
    def reason(self) -> str:
        """Why it is in use."""
        return self._now.reason

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What its programs are compiled with."""
        return self._now.compiler_options

    @property
    def reduction_mesh(self) -> Mesh:
        """The mesh, which is of CPUs."""
        return self._now.reduction_mesh

    def step(self, state: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Takes one step."""
        try:
            return self._now.step(state, in_flight, batch)
        except OwnCollectiveError as error:
            self._fuse(error)
        return self._now.step(state, in_flight, batch)

    def drain(self, state: Any, in_flight: Any) -> tuple[Any, Any, Any]:
        """Applies everything in flight."""
        try:
            return self._now.drain(state, in_flight)
        except OwnCollectiveError as error:
            self._fuse(error)
        return self._now.drain(state, in_flight)

    def lower(self, state: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the program in which a step computes."""
        return self._now.lower(state, in_flight, batch)

    def join(self) -> None:
        """Waits until no collective of its own is under way."""
        self._now.join()

    def _fuse(self, error: OwnCollectiveError) -> None:
        """Goes on with the fused executor; what was begun is begun anew."""
        self._now.join()
        self._now = Fused(self._config, error.reason)

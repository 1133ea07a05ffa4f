"""What an executor is."""

from typing import Any, Protocol

import jax
from jax.sharding import Mesh


class Executor(Protocol):
    """Runs the steps of a `StepConfig`."""

    @property
    def name(self) -> str:
        """As `make_train_step` takes it."""
        ...

    @property
    def reason(self) -> str:
        """Why it was chosen."""
        ...

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What its programs are compiled with."""
        ...

    @property
    def reduction_mesh(self) -> Mesh:
        """The devices on which it sums, where the codecs' states lie."""
        ...

    def step(self, state: Any, in_flight: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Takes one step; returns the state, what is in flight, and the info."""
        ...

    def drain(self, state: Any, in_flight: Any) -> tuple[Any, Any, Any]:
        """Applies everything in flight, in order; returns an info for each."""
        ...

    def lower(self, state: Any, in_flight: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the program in which a step computes."""
        ...

    def join(self) -> None:
        """Waits until no collective of its own is under way."""
        ...

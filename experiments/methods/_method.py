"""What a way to train is, to those who compare several."""

import abc
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


class Method(abc.ABC):
    """One host's part of a training run.

    Attributes:
      width: steps from a gradient to its update.
    """

    width: int = 1

    @abc.abstractmethod
    def step(self, batch: Batch) -> None:
        """One step with this host's share of a batch; may return before it is done."""

    def wait(self) -> None:  # noqa: B027 - nothing to wait for is a way to do it
        """Until the parameters after the last step are there."""

    def finish(self) -> None:
        """Applies what is in flight; from then on this host sends nothing."""
        self.wait()

    @abc.abstractmethod
    def params(self) -> Any:
        """The parameters now, as Flax has them."""

    def close(self) -> None:  # noqa: B027
        """Gives back threads and connections."""

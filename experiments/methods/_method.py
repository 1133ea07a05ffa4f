"""The interface of a way to train, for programs that compare several."""

import abc
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


class Method(abc.ABC):
    """The part of one host in a training run.

    Attributes:
      width: The width K of the pipeline, 1 if there is no pipeline.
    """

    width: int = 1

    @abc.abstractmethod
    def step(self, batch: Batch) -> None:
        """Runs a step on this host's share of a batch.

        The method may return before the step has ended.
        """

    def wait(self) -> None:  # noqa: B027 - some methods have nothing to wait for
        """Waits until the parameters after the last step have been computed."""

    def join(self) -> None:
        """Waits until this host sends nothing; gradients in flight stay in flight."""
        self.wait()

    def finish(self) -> None:
        """Applies the gradients in flight; from then on, this host sends nothing."""
        self.wait()

    @abc.abstractmethod
    def params(self) -> Any:
        """Returns the present parameters, with Flax's names and layouts."""

    def close(self) -> None:  # noqa: B027
        """Ends the threads and closes the connections of this method."""

"""The interface of a way to train, for programs that compare several."""

import abc
import dataclasses
from typing import Any, Protocol

import jax
import numpy as np
import optax

Batch = dict[str, np.ndarray]


class Trainable(Protocol):
    """The part of a problem that the methods of this library need."""

    @property
    def warmup(self) -> int:
        """Returns the number of synchronous steps with which a pipeline begins."""

    @property
    def start(self) -> Any:
        """Returns the parameters at the start, in the memory of the host."""

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Returns the optimizer."""

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Returns the mean loss of a batch."""

    def random_batch(self, host: int) -> Batch:
        """Returns a batch for timing."""


def flags(problem: Any, prefix: str = "--problem.") -> list[str]:
    """Returns the flags of a problem for the command line of another program.

    Args:
      problem: A dataclass, whose fields have the names of the flags.
      prefix: What every flag begins with.
    """
    return [
        argument
        for name, value in dataclasses.asdict(problem).items()
        for argument in (prefix + name.replace("_", "-"), str(value))
    ]


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

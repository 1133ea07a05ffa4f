"""The interface of a problem in PyTorch."""

import abc
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from ._method import Batch


class Twin(abc.ABC):
    """A problem in PyTorch that equals one in JAX, which AdamW trains.

    Attributes:
      module: The model, with the parameters at the start.
      clip: The norm to which gradients are clipped, or `None`.
    """

    module: nn.Module
    clip: float | None = None

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the mean loss of a batch by `model`, which calls the module."""

    @abc.abstractmethod
    def params(self) -> Any:
        """Returns the parameters with the names and layouts that they have in JAX."""

    @property
    @abc.abstractmethod
    def adamw(self) -> dict[str, Any]:
        """Returns the settings of AdamW at the start."""

    @property
    @abc.abstractmethod
    def factors(self) -> np.ndarray | None:
        """Returns the factor of the learning rate in each step, or `None`."""

    def groups(self) -> Iterable[Any]:
        """Returns the parameters as the optimizer takes them."""
        return self.module.parameters()

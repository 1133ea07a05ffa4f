"""The models of `experiments.models` in PyTorch, with the same parameters at the start.

Modules and layers have the names that Flax gives them, so that a parameter has the same
path in both libraries.
"""

from typing import Any

import jax
import numpy as np
import optax
import torch
from torch import nn
from torch.nn import functional

from ._method import Batch
from ._problem import Problem
from ._torch_twin import Twin


class ImageTwin(Twin):
    """A classifier of images."""

    def __init__(self, problem: Problem) -> None:
        if problem.model not in MODELS or max(problem.image_shape) > 64:
            raise ValueError(
                f"`problem` must have a model of {', '.join(MODELS)} and images of up"
                f" to 64 pixels, got {problem.model} for {problem.dataset}. Only these"
                " are written in PyTorch here; leave the methods of DDP out."
            )
        self.module = MODELS[problem.model](problem.image_shape)
        load(self.module, problem.start)
        self._problem = problem

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images = torch.from_numpy(batch["image"])
        labels = torch.from_numpy(batch["label"]).long()
        return functional.cross_entropy(model(images), labels)

    def params(self) -> Any:
        return flax_params(self.module)

    @property
    def adamw(self) -> dict[str, Any]:
        problem = self._problem
        return {"lr": problem.learning_rate, "weight_decay": problem.weight_decay}

    @property
    def factors(self) -> np.ndarray | None:
        if self._problem.steps is None:
            return None
        factor = optax.cosine_decay_schedule(1.0, self._problem.steps)
        return np.asarray(jax.vmap(factor)(np.arange(self._problem.steps + 1)))


class MLP(nn.Module):
    """The same model as `experiments.models.MLP`."""

    def __init__(self, image_shape: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        self.Dense_0 = nn.Linear(int(np.prod(image_shape)), hidden)
        self.Dense_1 = nn.Linear(hidden, hidden)
        self.Dense_2 = nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        x = functional.relu(self.Dense_0(x.flatten(1)))
        return self.Dense_2(functional.relu(self.Dense_1(x)))


class CNN(nn.Module):
    """The same model as `experiments.models.CNN`."""

    def __init__(self, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        height, width, channels = image_shape
        self.Conv_0 = nn.Conv2d(channels, 32, 3, padding=1)
        self.Conv_1 = nn.Conv2d(32, 64, 3, padding=1)
        self.Conv_2 = nn.Conv2d(64, 64, 3, padding=1)
        self.Dense_0 = nn.Linear((height // 4) * (width // 4) * 64, 128)
        self.Dense_1 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        x = functional.relu(self.Conv_0(_channels_first(x)))
        x = functional.relu(self.Conv_1(functional.max_pool2d(x, 2)))
        x = functional.max_pool2d(functional.relu(self.Conv_2(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # the order in Flax
        return self.Dense_1(functional.relu(self.Dense_0(x)))


class BasicBlock(nn.Module):
    """The same block as `experiments.models.BasicBlock` with group norm."""

    def __init__(self, inputs: int, features: int, stride: int) -> None:
        super().__init__()
        self.Conv_0 = _conv(inputs, features, 3, stride)
        self.GroupNorm_0 = nn.GroupNorm(32, features)
        self.Conv_1 = _conv(features, features, 3, 1)
        self.GroupNorm_1 = nn.GroupNorm(32, features)
        self._changes = inputs != features or stride != 1
        if self._changes:
            self.Conv_2 = _conv(inputs, features, 1, stride)
            self.GroupNorm_2 = nn.GroupNorm(32, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the block, whose shape may differ from that of x."""
        branch = functional.relu(self.GroupNorm_0(self.Conv_0(x)))
        branch = self.GroupNorm_1(self.Conv_1(branch))
        if self._changes:
            x = self.GroupNorm_2(self.Conv_2(x))
        return functional.relu(x + branch)


class ResNet18(nn.Module):
    """The same model as `experiments.models.ResNet18` with group norm.

    It is for small images.
    """

    def __init__(self, image_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.Conv_0 = _conv(image_shape[-1], 64, 3, 1)
        self.GroupNorm_0 = nn.GroupNorm(32, 64)
        blocks, inputs = [], 64
        for stage, features in enumerate((64, 128, 256, 512)):
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(BasicBlock(inputs, features, stride))
                inputs = features
        for number, block in enumerate(blocks):
            self.add_module(f"BasicBlock_{number}", block)
        self._blocks = len(blocks)
        self.Dense_0 = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        x = functional.relu(self.GroupNorm_0(self.Conv_0(_channels_first(x))))
        for number in range(self._blocks):
            x = self.get_submodule(f"BasicBlock_{number}")(x)
        return self.Dense_0(x.mean(dim=(2, 3)))


MODELS: dict[str, Any] = {
    "mlp": lambda shape: MLP(shape, 256),
    "wide_mlp": lambda shape: MLP(shape, 1664),
    "cnn": CNN,
    "resnet18": ResNet18,
}


def _conv(inputs: int, features: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, features, size, stride, size // 2, bias=False)


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    """Returns a view [B, C, H, W] of memory [B, H, W, C], with which oneDNN is fast."""
    return x.permute(0, 3, 1, 2)


# The permutations of a kernel's axes from Flax to PyTorch, and back. Kernels are
# [in, out] and [height, width, in, out] in Flax, and [out, in] and
# [out, in, height, width] in PyTorch.
_FROM_FLAX = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}
_TO_FLAX = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}


def load(module: nn.Module, params: Any) -> None:
    own = dict(module.named_parameters())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    with torch.no_grad():
        for path, leaf in leaves:
            name = _torch_name([str(key.key) for key in path])
            array = np.asarray(leaf).transpose(_FROM_FLAX[leaf.ndim])
            own.pop(name).copy_(torch.from_numpy(array.copy()))
    assert not own, f"not in Flax: {sorted(own)}"


def flax_params(module: nn.Module) -> Any:
    params: dict[str, Any] = {}
    for name, value in module.named_parameters():
        *path, leaf = name.split(".")
        place = params
        for key in path:
            place = place.setdefault(key, {})
        array = value.detach().numpy().transpose(_TO_FLAX[value.ndim])
        place[_flax_leaf(path[-1], leaf)] = array.copy()
    return params


def _torch_name(path: list[str]) -> str:
    *place, leaf = path
    return ".".join([*place, "bias" if leaf == "bias" else "weight"])


def _flax_leaf(layer: str, leaf: str) -> str:
    if leaf == "bias":
        return "bias"
    return "scale" if layer.startswith("GroupNorm") else "kernel"

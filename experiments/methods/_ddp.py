"""Trains by PyTorch's DistributedDataParallel over Gloo, plain or with its hooks.

With "zero", its `ZeroRedundancyOptimizer` shards AdamW over the hosts.

The models are those of `experiments.models`, with the same parameters at the start.
Modules and layers have the names that Flax gives them, so that a parameter has the same
path in both libraries.
"""

import os
from typing import Any, Literal

import jax
import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.nn import functional

from ._method import Batch, Method
from ._problem import Problem

Hook = Literal["none", "fp16", "power_sgd", "silent", "zero"]


class DDP(Method):
    """A model in PyTorch whose gradients are averaged while others are computed."""

    def __init__(self, problem: Problem, port: int, hook: Hook, rank: int) -> None:
        if problem.model not in _MODELS or max(problem.image_shape) > 64:
            raise ValueError(
                f"`problem` must have a model of {', '.join(_MODELS)} and images of up"
                f" to 64 pixels, got {problem.model} for {problem.dataset}. Only these"
                " are written in PyTorch here; leave the methods of DDP out."
            )
        _join(port)
        self._own = _MODELS[problem.model](problem.image_shape)
        _load(self._own, problem.start)
        self._silent = hook == "silent"
        # PowerSGD's hook exchanges twice for each bucket, the second time from another
        # thread. Over Gloo, two buckets would mix up their messages, so that there is
        # only one bucket.
        self._model = nn.parallel.DistributedDataParallel(
            self._own,
            process_group=(group := torch.distributed.new_group()),
            bucket_cap_mb=1000 if hook == "power_sgd" else None,
            gradient_as_bucket_view=True,
        )
        if hook == "fp16":
            self._model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        elif hook == "power_sgd":
            state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=rank, start_powerSGD_iter=2
            )
            self._model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        settings: dict[str, Any] = {
            "lr": problem.learning_rate,
            "weight_decay": problem.weight_decay,
            "fused": True,
        }
        self._optimizer: torch.optim.Optimizer
        if hook == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

            self._optimizer = ZeroRedundancyOptimizer(
                self._own.parameters(), torch.optim.AdamW, **settings
            )
        else:
            self._optimizer = torch.optim.AdamW(self._own.parameters(), **settings)
        self._schedule: Any = None
        if problem.steps is not None:
            self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
                self._optimizer, problem.steps
            )

    def step(self, batch: Batch) -> None:
        """Runs forward, backward with the exchange beside it, and the update."""
        images = torch.from_numpy(batch["image"])
        labels = torch.from_numpy(batch["label"]).long()
        self._optimizer.zero_grad()
        if self._silent:
            with self._model.no_sync():
                self._descend(images, labels)
        else:
            self._descend(images, labels)

    def _descend(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        functional.cross_entropy(self._model(images), labels).backward()
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    def params(self) -> Any:
        """Returns the parameters with Flax's names and layouts."""
        return _flax_params(self._own)


def _join(port: int) -> None:
    if not torch.distributed.is_initialized():
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{os.environ['MASTER_ADDR']}:{port}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )


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


_MODELS: dict[str, Any] = {
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


def _load(module: nn.Module, params: Any) -> None:
    own = dict(module.named_parameters())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    with torch.no_grad():
        for path, leaf in leaves:
            name = _torch_name([str(key.key) for key in path])
            array = np.asarray(leaf).transpose(_FROM_FLAX[leaf.ndim])
            own.pop(name).copy_(torch.from_numpy(array.copy()))
    assert not own, f"not in Flax: {sorted(own)}"


def _flax_params(module: nn.Module) -> Any:
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

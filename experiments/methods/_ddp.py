"""Trains by PyTorch's DistributedDataParallel over Gloo, plain or with its hooks.

With "zero", its `ZeroRedundancyOptimizer` shards AdamW over the hosts.
"""

import os
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)

from ._method import Batch, Method
from ._torch_twin import Twin

Hook = Literal["none", "fp16", "power_sgd", "silent", "zero"]


class DDP(Method):
    """A model in PyTorch whose gradients are averaged while others are computed."""

    def __init__(self, twin: Twin, port: int, hook: Hook, rank: int) -> None:
        _join(port)
        self._twin = twin
        self._silent = hook == "silent"
        # PowerSGD's hook exchanges twice for each bucket, the second time from another
        # thread. Over Gloo, two buckets would mix up their messages, so that there is
        # only one bucket.
        self._model = nn.parallel.DistributedDataParallel(
            twin.module,
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
        settings = twin.adamw | {"fused": True}
        self._optimizer: torch.optim.Optimizer
        if hook == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

            self._optimizer = ZeroRedundancyOptimizer(
                twin.groups(), torch.optim.AdamW, **settings
            )
        else:
            self._optimizer = torch.optim.AdamW(twin.groups(), **settings)
        self._schedule: Any = None
        if (factors := twin.factors) is not None:
            self._schedule = torch.optim.lr_scheduler.LambdaLR(
                self._optimizer, lambda step: float(factors[step])
            )

    def step(self, batch: Batch) -> None:
        """Runs forward, backward with the exchange beside it, and the update."""
        self._optimizer.zero_grad()
        if self._silent:
            with self._model.no_sync():
                self._descend(batch)
        else:
            self._descend(batch)

    def _descend(self, batch: Batch) -> None:
        self._twin.loss(self._model, batch).backward()
        if self._twin.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._twin.clip)
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    def params(self) -> Any:
        """Returns the parameters with the names and layouts that they have in JAX."""
        return self._twin.params()


def _join(port: int) -> None:
    if not torch.distributed.is_initialized():
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{os.environ['MASTER_ADDR']}:{port}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )

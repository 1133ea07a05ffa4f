"""The transformer of `experiments.transformer` in PyTorch, with the same parameters."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from experiments import transformer

from ._method import Batch
from ._text_problem import TextProblem
from ._torch_twin import Twin


class TextTwin(Twin):
    """A transformer that predicts the next character."""

    def __init__(self, problem: TextProblem) -> None:
        self.module = Transformer(problem.start, problem.config)
        self.clip = problem.clip
        self._problem = problem

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        tokens = torch.from_numpy(batch["tokens"]).long()
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def params(self) -> Any:
        module = self.module
        assert isinstance(module, Transformer)
        return jax.tree.map(lambda x: x.detach().numpy().copy(), module.tree)

    def groups(self) -> Iterable[Any]:
        parameters = list(self.module.parameters())
        matrices = [x for x in parameters if x.ndim > 1]
        rest = [x for x in parameters if x.ndim <= 1]
        decay = self._problem.weight_decay
        return [
            {"params": matrices, "weight_decay": decay},
            {"params": rest, "weight_decay": 0.0},
        ]

    @property
    def adamw(self) -> dict[str, Any]:
        return {"lr": self._problem.learning_rate, "betas": (0.9, self._problem.b2)}

    @property
    def factors(self) -> np.ndarray:
        rates = jax.vmap(self._problem.schedule)(np.arange(self._problem.steps + 1))
        return np.asarray(rates) / self._problem.learning_rate


class Transformer(nn.Module):
    """The same model as `experiments.transformer`, without `scan`.

    Attributes:
      tree: The parameters as a pytree with the names that they have in JAX.
    """

    tree: Any

    def __init__(self, start: transformer.Params, config: transformer.Config) -> None:
        super().__init__()
        self._heads = config.heads
        self.tree = jax.tree.map(
            lambda x: nn.Parameter(torch.from_numpy(np.array(x))), start
        )
        for path, parameter in jax.tree_util.tree_leaves_with_path(self.tree):
            name = jax.tree_util.keystr(path, simple=True, separator="_")
            self.register_parameter(name, parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits [B, T, vocabulary] of tokens [B, T]."""
        tree = self.tree
        x = tree["embedding"][tokens] + tree["position"][: tokens.shape[1]]
        for p in tree["layers"]:
            x = x + self._attention(_norm(x, p["attention_norm"]) @ p["qkv"]) @ p["out"]
            hidden = _norm(x, p["mlp_norm"]) @ p["up"]
            x = x + functional.gelu(hidden, approximate="tanh") @ p["down"]
        return _norm(x, tree["norm"]) @ tree["embedding"].T

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns the causal attention [B, T, d] of [B, T, 3 d]."""
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).reshape(batch, length, -1)


def _norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scale * functional.rms_norm(x, x.shape[-1:], eps=1e-6)

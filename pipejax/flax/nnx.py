"""A Flax NNX model into a train step, and back.

- `split`: a pure loss, the parameters, and all else the model holds (batch statistics,
  random streams) as the model state
- `update`: writes parameters and model state back into the model

Both are nested dicts of arrays, so that any Optax transformation and any checkpoint
library takes them.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import pipejax as pj

from ._drained import check_drained

Tree = dict[Any, Any]


def split(
    model: nnx.Module, loss_fn: Callable[[Any, Any], Any]
) -> tuple[Callable[..., Any], Tree, Tree]:
    """A model and a loss on it, as a pure loss with its arguments.

    Args:
      model: as it shall train: after `model.train()`. It is not changed.
      loss_fn: `loss_fn(model, batch) -> loss` or `(loss, metrics)`.

    Returns:
      `pure_loss_fn, params, model_state` for

          train = pj.make_train_step(pure_loss_fn, tx, mesh=mesh)
          state = train.init(params, model_state=model_state, rng=jax.random.key(0))

      With an `rng` every random stream of the model starts anew from the key of its
      device and step, and `model_state` carries the streams as they were. Without one
      they run on by themselves, and all devices draw the same dropout masks.
    """
    graph = nnx.graphdef(model)

    def pure_loss_fn(
        params: Any, batch: Any, *, model_state: Any, rng: jax.Array | None = None
    ) -> tuple[jax.Array, pj.Aux]:
        model = nnx.merge(graph, params, model_state)
        streams = _arrays(model, nnx.RngState)
        if rng is not None:
            nnx.reseed(model, policy="match_shape", **_stream_keys(model, rng))
        out = loss_fn(model, batch)
        loss, metrics = out if isinstance(out, tuple) else (out, None)
        if rng is not None:
            # Each device's own until here: carried on, they would differ.
            nnx.update(model, streams)
        after = _arrays(model, nnx.Not(nnx.Param))
        return loss, pj.Aux(metrics=metrics, model_state=after)

    return pure_loss_fn, _arrays(model, nnx.Param), _arrays(model, nnx.Not(nnx.Param))


def update(model: nnx.Module, state: pj.PipelineState) -> None:
    """Writes what was trained into the model, in place.

    Args:
      model: as `split` was given it.
      state: from `train.drain`. Its arrays are shared, not copied: a step made with
        `donate=True` from the same state would take them away.

    Raises:
      ValueError: if gradients are still in flight.
    """
    check_drained(state)
    nnx.update(model, state.params, state.model_state or {})


def _arrays(model: nnx.Module, only: Any) -> Tree:
    return nnx.to_pure_dict(nnx.state(model, only))


def _stream_keys(model: nnx.Module, rng: jax.Array) -> dict[str, Any]:
    """A key for each name of a random stream in the model."""
    nodes = (node for _, node in nnx.iter_graph(model))
    names = sorted({node.tag for node in nodes if isinstance(node, nnx.RngStream)})
    return dict(zip(names, jax.random.split(rng, len(names)), strict=True))

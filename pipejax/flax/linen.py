"""A Flax `TrainState` into a train step, and back.

- `init`: parameters, optimizer state, step and, where there are any, batch statistics
- `update`: the same four, written back

The loss calls the model itself, as in any Flax loop. With batch-norm statistics and
dropout it is in the full form:

    def loss_fn(params, batch, *, model_state, rng):
        logits, model_state = model.apply(
            {"params": params, **model_state},
            batch["x"],
            train=True,
            rngs={"dropout": rng},
            mutable=["batch_stats"],
        )
        return cross_entropy(logits, batch["y"]), pj.Aux(model_state=model_state)
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj

from ._drained import check_drained

AnyTrainState = TypeVar("AnyTrainState", bound=TrainState)


def init(
    train: pj.TrainStep,
    train_state: TrainState,
    *,
    rng: jax.Array | None = None,
    batch: Any = None,
) -> pj.PipelineState:
    """The state from which `train` goes on where `train_state` stands.

    Args:
      train: made with the same optimizer as `train_state`: `train_state.tx`.
      train_state: its `params`, `opt_state` and `step` are taken, and a `batch_stats`
        attribute, if it has one, as the model state `{"batch_stats": ...}`.
      rng: as for `train.init`.
      batch: as for `train.init`.

    Returns:
      A `PipelineState`; copies, as from `train.init`.
    """
    batch_stats = getattr(train_state, "batch_stats", None)
    state = train.init(
        train_state.params,
        model_state=None if batch_stats is None else {"batch_stats": batch_stats},
        rng=rng,
        opt_state=train_state.opt_state,
        batch=batch,
    )
    step = jnp.asarray(train_state.step, jnp.int32)
    return state._replace(step=jax.device_put(step, NamedSharding(train.mesh, P())))


def update(train_state: AnyTrainState, state: pj.PipelineState) -> AnyTrainState:
    """The `TrainState` with what was trained written into it.

    Args:
      train_state: as `init` was given it.
      state: from `train.drain`. Its arrays are shared, not copied: a step made with
        `donate=True` from the same state would take them away.

    Returns:
      `train_state` with new `params`, `opt_state`, `step` and, if there is a model
      state, `batch_stats`.

    Raises:
      ValueError: if gradients are still in flight.
    """
    check_drained(state)
    changed = {} if state.model_state is None else dict(state.model_state)
    return train_state.replace(
        params=state.params, opt_state=state.opt_state, step=state.step, **changed
    )

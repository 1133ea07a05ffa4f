"""A Flax `TrainState` into a train step, and back.

- `init`: parameters, optimizer state, step and variable collections
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

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict, freeze, unfreeze
from flax.training.dynamic_scale import DynamicScale
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
    collections: Sequence[str] = ("batch_stats",),
) -> pj.PipelineState:
    """Returns the state from which `train` goes on where `train_state` stands.

    Args:
      train: made with the same optimizer as `train_state`: `train_state.tx`.
      train_state: its `params`, `opt_state` and `step` are taken, and the fields that
        `collections` names. Any other field must be without arrays.
      rng: as for `train.init`.
      batch: as for `train.init`.
      collections: fields that hold variable collections which the loss is passed and
        returns, `{name: collection}`, as the model state. A field that `train_state`
        does not have, or that is `None`, is left out.

    Returns:
      A `PipelineState`; copies, as from `train.init`.

    Raises:
      ValueError: for a `dynamic_scale`, another field that a train step would leave as
        it is, or a `train_state` that is replicated for `jax.pmap`.
    """
    _check_fields(train_state, collections)
    found = {name: getattr(train_state, name, None) for name in collections}
    model_state = {name: _thawed(x) for name, x in found.items() if x is not None}
    state = train.init(
        train_state.params,
        model_state=model_state or None,
        rng=rng,
        opt_state=train_state.opt_state,
        batch=batch,
    )
    step: Any = train_state.step
    step = step.astype(np.int32) if isinstance(step, jax.Array) else np.int32(step)
    return state._replace(step=jax.device_put(step, NamedSharding(train.mesh, P())))


def update(train_state: AnyTrainState, state: pj.PipelineState) -> AnyTrainState:
    """Returns the `TrainState` with what was trained written into it.

    Args:
      train_state: as `init` was given it.
      state: from `train.drain`. Its arrays are shared, not copied: a step made with
        `donate=True` from the same state would take them away.

    Returns:
      `train_state` with new `params`, `opt_state`, `step` and variable collections.

    Raises:
      ValueError: if gradients are still in flight.
    """
    check_drained(state)
    changed = {} if state.model_state is None else dict(state.model_state)
    for name, collection in changed.items():
        if isinstance(getattr(train_state, name, None), FrozenDict):
            changed[name] = freeze(collection)
    return train_state.replace(
        params=state.params, opt_state=state.opt_state, step=state.step, **changed
    )


def _thawed(collection: Any) -> Any:
    """Returns what `apply` returns of the same collection, whose dicts are ordinary."""
    return unfreeze(collection) if isinstance(collection, FrozenDict) else collection


def _check_fields(train_state: TrainState, collections: Sequence[str]) -> None:
    """Raises a ValueError for what a train step would silently leave as it is."""
    own = {field.name for field in dataclasses.fields(TrainState)}
    if isinstance(collections, str) or own & {*collections}:
        raise ValueError(
            "`collections` must be a sequence of names of variable collections, none of"
            f" {', '.join(sorted(own))}; got {collections!r}. Parameters are taken from"
            " `params`: `collections=['batch_stats']`."
        )
    if jnp.ndim(train_state.step):
        raise ValueError(
            "`train_state` must not be replicated for jax.pmap, got a `step` of shape"
            f" {jnp.shape(train_state.step)}. Pass"
            " `flax.jax_utils.unreplicate(train_state)`."
        )
    taken = own | {*collections}
    for field in dataclasses.fields(train_state):
        value = getattr(train_state, field.name)
        static = not field.metadata.get("pytree_node", True)
        if static or field.name in taken or not jax.tree.leaves(value):
            continue
        if isinstance(value, DynamicScale):
            raise ValueError(
                "`train_state` must not have a DynamicScale, got one in"
                f" `{field.name}`: a train step scales no loss. Compute in bfloat16,"
                " which has the range of float32 and needs no scale:"
                " `pj.make_train_step(..., compute_dtype=jnp.bfloat16)`, and"
                f" `train_state.replace({field.name}=None)`. Updates that are not"
                " finite are skipped and counted (`skip_nonfinite`)."
            )
        raise ValueError(
            "`train_state` must have no field that training would leave as it is, got"
            f" `{field.name}`. If it is a variable collection that the loss returns,"
            f" name it: `collections={(*collections, field.name)}`. Else set it aside:"
            f" `train_state.replace({field.name}=None)`; a key belongs in `rng`,"
            " metrics in what the loss returns."
        )

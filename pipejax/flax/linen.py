"""Trains a Flax Linen `TrainState`: `init` begins with it, `update` returns a new one.

The loss function calls the model itself, as in any Linen training loop. With
batch-norm statistics and dropout, the loss takes the model state and a key:

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
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict, freeze, unfreeze
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax._internal.mesh import without_mesh

from ._drained import check_drained

AnyTrainState = TypeVar("AnyTrainState", bound=TrainState)


@overload
def init(
    train: pj.TrainStep,
    train_state: TrainState,
    *,
    rng: Any = None,
    batch: Any = None,
    shared: Any = None,
    collections: Sequence[str] = ("batch_stats",),
) -> pj.PipelineState: ...


@overload
def init(
    train: pj.LocalTrainStep,
    train_state: TrainState,
    *,
    rng: Any = None,
    batch: Any = None,
    shared: Any = None,
    collections: Sequence[str] = ("batch_stats",),
) -> pj.LocalState: ...


def init(
    train: pj.TrainStep | pj.LocalTrainStep,
    train_state: TrainState,
    *,
    rng: Any = None,
    batch: Any = None,
    shared: Any = None,
    collections: Sequence[str] = ("batch_stats",),
) -> pj.PipelineState | pj.LocalState:
    """Returns the state with which `train` continues from `train_state`.

    It calls `train.init` with the parts of `train_state`, and sets the step of the
    result.

    Args:
      train: A train step from `pj.make_train_step` or `pj.make_local_step`, made with
        the optimizer of `train_state`, `train_state.tx`.
      train_state: Its `params`, `opt_state` and `step` are copied, and so are the
        fields that `collections` names. No other field may contain arrays.
      rng: Same as in `train.init`.
      batch: Same as in `train.init`.
      shared: Same as in `train.init`.
      collections: Names of the fields that hold variable collections. The loss receives
        and returns them as the model state, a dict `{name: collection}`. A field that
        does not exist or is `None` is left out.

    Returns:
      A `pj.PipelineState` or `pj.LocalState` whose arrays are copies.

    Raises:
      ValueError: If `train_state` has a `dynamic_scale` or another field that a train
        step would not update, if it is replicated for `jax.pmap`, or if an argument
        breaks its rule.

    Examples:
      >>> import jax.numpy as jnp, optax, pipejax as pj
      >>> import pipejax.flax.linen
      >>> from flax.training.train_state import TrainState
      >>> def loss_fn(params, batch):
      ...     return 0.5 * jnp.mean((params["w"] - batch) ** 2)
      >>> tx, params = optax.sgd(0.1), {"w": jnp.array(1.0)}
      >>> train_state = TrainState.create(apply_fn=None, params=params, tx=tx)
      >>> train = pj.make_train_step(loss_fn, tx, mesh=pj.data_mesh(1))
      >>> state = pj.flax.linen.init(train, train_state)
      >>> state, _ = train.step(state, jnp.zeros(4))
      >>> state, _ = train.drain(state)
      >>> train_state = pj.flax.linen.update(train_state, state)
      >>> print(f"{train_state.params['w']:.1f} at step {train_state.step}")
      0.9 at step 1
    """
    _check_fields(train_state, collections)
    found = {name: getattr(train_state, name, None) for name in collections}
    model_state = {name: _thawed(x) for name, x in found.items() if x is not None}
    # A model without statistics has an empty collection, and its loss may be plain.
    none = not jax.tree.leaves(model_state)
    state = train.init(
        train_state.params,
        model_state=None if none else model_state,
        rng=rng,
        opt_state=train_state.opt_state,
        batch=batch,
        shared=shared,
    )
    step: Any = train_state.step
    # A copy, since a step with `donate=True` overwrites the state's.
    array = isinstance(step, jax.Array)
    step = jnp.array(step, jnp.int32) if array else np.int32(step)
    if isinstance(state, pj.LocalState):
        return _of_groups_at(state, step)
    return state._replace(step=jax.device_put(step, NamedSharding(train.mesh, P())))


def update(
    train_state: AnyTrainState, state: pj.PipelineState | pj.LocalState
) -> AnyTrainState:
    """Returns `train_state` with the trained values written into it.

    Args:
      train_state: The `TrainState` that was passed to `init`. It is not changed.
      state: A state with nothing in flight, from `train.drain`. After local steps, the
        result has the anchor and the mean of the groups' optimizer states,
        `state.opt_state`, and all processes must call this function. The result shares
        arrays with `state`. A later step from the same state with `donate=True` would
        delete them.

    Returns:
      A new `TrainState` with what has been trained, and with all other fields of
      `train_state`.

    Raises:
      ValueError: If `state` has not been drained.
    """
    check_drained(state)
    changed = {} if state.model_state is None else dict(state.model_state)
    for name, collection in changed.items():
        if isinstance(getattr(train_state, name, None), FrozenDict):
            changed[name] = freeze(collection)
    return train_state.replace(
        params=state.params, opt_state=state.opt_state, step=state.step, **changed
    )


@without_mesh()
def _of_groups_at(state: pj.LocalState, step: Any) -> pj.LocalState:
    zeros: Any = state.local.step  # no group has taken a step yet
    step = jax.device_put(step, NamedSharding(zeros.sharding.mesh, P()))
    local = state.local._replace(step=zeros + step)
    return state._replace(own=state.own._replace(local=local))


def _thawed(collection: Any) -> Any:
    return unfreeze(collection) if isinstance(collection, FrozenDict) else collection


def _check_fields(train_state: TrainState, collections: Sequence[str]) -> None:
    own = {field.name for field in dataclasses.fields(TrainState)}
    if isinstance(collections, str) or own & {*collections}:
        raise ValueError(
            "`collections` must be a sequence of names of variable collections, none of"
            f" them a field of every TrainState ({', '.join(sorted(own))}); got"
            f" {collections!r}. Parameters are always taken from `params`. Pass"
            " `collections=['batch_stats']`."
        )
    if jnp.ndim(train_state.step):
        raise ValueError(
            "`train_state` must not be replicated for jax.pmap, got a `step` of shape"
            f" {jnp.shape(train_state.step)}. Pass"
            " `flax.jax_utils.unreplicate(train_state)`."
        )
    if type(train_state).apply_gradients is not TrainState.apply_gradients:
        raise ValueError(
            "`train_state` must have the method `apply_gradients` of TrainState, which"
            " a train step replaces; got a"
            f" {type(train_state).__name__} with one of its own. Put what it does to"
            " gradients into `tx`, as an Optax transformation."
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
                f" `{field.name}`: a train step does not scale the loss. Compute in"
                " bfloat16, which has the range of float32 and needs no scale:"
                " `pj.make_train_step(..., compute_dtype=jnp.bfloat16)`, and pass"
                f" `train_state.replace({field.name}=None)`. Updates that are not"
                " finite are skipped and counted (`skip_nonfinite`)."
            )
        raise ValueError(
            "`train_state` must have no field that training would leave as it is, got"
            f" `{field.name}`. If it is a variable collection that the loss returns,"
            f" name it: `collections={(*collections, field.name)}`. Otherwise remove"
            f" it: `train_state.replace({field.name}=None)`. Pass a PRNG key as `rng`,"
            " and return metrics from the loss. Keep an average of the parameters in"
            " `tx`, or beside the step: it is made of `state.params`."
        )

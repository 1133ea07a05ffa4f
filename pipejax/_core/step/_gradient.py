r"""Computes the gradient of one device, and makes the message that it sends.

- Simple form of the loss: `loss_fn(params, batch)` returns a scalar.
- Full form: `loss_fn(params, batch, *, model_state, rng, shared)` returns
  `loss, Aux(...)`.
- m microbatches: the gradient is the mean of `g_j`, the gradients of the microbatches,
  which `lax.scan` computes one after another. Only the activations of one microbatch
  are in memory at a time.

  $$g = 1/m \sum_j g_j$$

- Weights `W_j`: the message holds the weighted sum of the gradients. After the sum over
  devices, it is divided by the sum of all weights, over microbatches and devices.

  $$\sum_j W_j g_j$$

- Frozen parameters (`_frozen`): no gradient is computed, and `None` takes its place.
- Mixed precision: the loss sees parameters and inputs in `compute_dtype`. The gradient
  is taken with respect to the master copy of the parameters, and has its dtype.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Passengers, travelling, with_constraints
from pipejax._internal.ranges import is_narrow
from pipejax._internal.ravel import working_dtype
from pipejax._internal.shards import UNSHARDED, Shards, constrained
from pipejax._internal.structures import merged, of_leaves
from pipejax._internal.types import Keys, ModelState, Tree

from ._contribution import combined, contribution
from ._frozen import without_frozen
from ._inputs import Inputs
from ._model_state import changes_of, counters_of, every_change
from ._step import Settings
from ._typed_loss import typed_loss
from ._unaveraged import check_unaveraged


def local_message(
    settings: Settings,
    params: optax.Params,
    model_state: ModelState,
    rng: Keys,
    inputs: Inputs,
    shards: Shards = UNSHARDED,
) -> tuple[Message, Tree]:
    """Runs the loss and its gradient over this device's share of the batch.

    Several microbatches get keys of their own, split from `rng`. Returned are also the
    leaves of the model state that advance at once, as this device's loss left them.
    """
    split, count = inputs.specs, settings.microbatches
    full = functools.partial(
        typed_loss(settings, shards, split),
        shared=constrained(inputs.shared, split.shared),
    )
    trained = without_frozen(settings.tx, params)
    specs = of_leaves(shards.params, params, trained)

    def of_trained(trained: Tree, **rest: Any) -> Any:
        return full(merged(trained, params), **rest)

    of_batch = functools.partial(
        contribution,
        of_trained,
        trained,
        axis_name=settings.axis_name,
        specs=specs,
        local_steps=settings.local_steps,
    )
    arrays = constrained(inputs.batch, split.batch)

    def of_first(params: optax.Params, batch: Tree, *rest: Any) -> Any:
        return full(params, first_part(batch, count), *rest)

    args = params, arrays, model_state, rng
    check_unaveraged(of_first, *args, settings.axis_name)
    if count == 1:
        gradients, passengers, returned = of_batch(arrays, model_state, rng)
    else:

        def add(carry: Any, inputs: Any) -> Any:
            total, before = carry
            gradients, passengers, returned = of_batch(inputs[0], before, inputs[1])
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients)
            after = returned.model_state
            return (total, after), (
                passengers,
                dataclasses.replace(returned, model_state=None),
            )

        parts = jax.tree.map(lambda x: _in_parts(x, count), arrays)
        # Without this, each microbatch may lie on a single device of the group.
        parts = constrained(parts, tuple(P(None, *spec) for spec in split.batch))
        keys = jax.tree.map(lambda key: jax.random.split(key, count), rng)
        # Many summands of 16 bits would lose bits, or overflow.
        zeros = constrained(jax.tree.map(_wide_zeros, trained), specs)
        (total, after), (each, returned) = lax.scan(
            add, (zeros, model_state), (parts, keys)
        )
        total, passengers = combined(total, each)
        gradients = jax.tree.map(lambda t, w: t.astype(w.dtype), total, trained)
        returned = dataclasses.replace(returned, model_state=after)
    moved = returned.model_state, model_state, returned.unchanged
    gradients = travelling(gradients, settings.reduce_dtype)
    changes = travelling(changes_of(*moved), settings.reduce_dtype)
    message = with_constraints(
        Message(
            gradients=gradients,
            changes=changes,
            passengers=passengers,
            shards=_shards_of(shards, (params, trained), (model_state, changes)),
        )
    )
    _check_range(trained, message)
    return message, counters_of(*moved)


def _wide_zeros(leaf: jax.Array) -> jax.Array:
    return jnp.zeros_like(leaf, working_dtype(leaf.dtype))


def empty_message(
    settings: Settings,
    params: optax.Params,
    model_state: ModelState,
    shards: Shards = UNSHARDED,
) -> Message:
    """Makes a message of zeros with all changes, whose only passenger is the loss."""
    trained = without_frozen(settings.tx, params)
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trained)
    changes = travelling(every_change(model_state), settings.reduce_dtype)
    return Message(
        gradients=travelling(gradients, settings.reduce_dtype),
        changes=changes,
        passengers=Passengers.of(jnp.zeros(()), None),
        shards=_shards_of(shards, (params, trained), (model_state, changes)),
    )


def _shards_of(
    shards: Shards, params: tuple[Tree, Tree], model_state: tuple[Tree, Tree]
) -> Shards:
    """Returns how a group shards a message, from how it shards the state.

    `params` and `model_state` are pairs of what the state has and what the message has.
    """
    return Shards(
        params=of_leaves(shards.params, *params),
        changes=of_leaves(shards.model_state, *model_state),
        data_axes=of_leaves(shards.data_axes, *params),
        inner=shards.inner,
    )


def first_part(batch: Tree, count: int) -> Tree:
    """Returns the first of so many microbatches, as the loss function is given it."""
    if count == 1:
        return batch
    return jax.tree.map(lambda x: _in_parts(x, count)[0], batch)


def _in_parts(x: jax.Array, count: int) -> jax.Array:
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _check_range(params: Tree, message: Message) -> None:
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, message.gradients))}
    narrow = sorted(filter(is_narrow, dtypes), key=str)
    if message.weight is not None and narrow:
        raise ValueError(
            f"`reduce_dtype` and parameters must not be {narrow[0]} where `loss_fn`"
            " returns a weight: gradients are multiplied by it, and this dtype ends at"
            f" {float(jnp.finfo(narrow[0]).max):,.0f}. Choose"
            " reduce_dtype=jnp.bfloat16 or jnp.float32, and keep parameters in float32,"
            " with compute_dtype=jnp.float16."
        )

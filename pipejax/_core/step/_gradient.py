r"""Computes the gradient of one device, and makes the message that it sends.

- Simple form of the loss: `loss_fn(params, batch)` returns a scalar.
- Full form: `loss_fn(params, batch, *, model_state, rng)` returns `loss, Aux(...)`.
- m microbatches: the gradient is the mean of `g_j`, the gradients of the microbatches,
  which `lax.scan` computes one after another. Only the activations of one microbatch
  are in memory at a time.

  $$g = 1/m \sum_j g_j$$

- Weights `W_j`: the message holds the weighted sum of the gradients. After the sum over
  devices, it is divided by the sum of all weights, over microbatches and devices.

  $$\sum_j W_j g_j$$

- Mixed precision: the loss sees parameters and batch in `compute_dtype`. The gradient
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
from jax.typing import DTypeLike

from pipejax._core.message import Message, Passengers, travelling, with_constraints
from pipejax._internal.shards import UNSHARDED, Shards, constrained
from pipejax._internal.types import Keys, ModelState

from ._batch import Batch
from ._contribution import combined, contribution
from ._model_state import changes_of, every_change, warn_of_zeros, with_changes
from ._step import Settings
from ._typed_loss import typed_loss


def local_message(
    settings: Settings,
    params: optax.Params,
    model_state: ModelState,
    rng: Keys,
    batch: Batch,
    shards: Shards = UNSHARDED,
    room: Any = None,
) -> tuple[Message, Any]:
    """Runs the loss and its gradient over this device's share of the batch.

    Several microbatches get keys of their own, split from `rng`. `room` has the changes
    of model state for which the queue has room, or is `None` without a queue. The model
    state that is returned is that of this device alone.
    """
    full = typed_loss(settings, shards, batch.specs)
    of_batch = functools.partial(
        contribution, full, params, axis_name=settings.axis_name, specs=shards.params
    )
    arrays, count = constrained(batch.arrays, batch.specs), settings.microbatches
    if count == 1:
        gradients, passengers, returned = of_batch(arrays, model_state, rng)
    else:

        def add(carry: Any, inputs: Any) -> Any:
            total, before = carry
            gradients, passengers, returned = of_batch(inputs[0], before, inputs[1])
            total = jax.tree.map(jnp.add, total, gradients)
            after = returned.model_state
            return (total, after), (
                passengers,
                dataclasses.replace(returned, model_state=None),
            )

        parts = jax.tree.map(lambda x: _in_parts(x, count), arrays)
        # Without this, each microbatch may lie on a single device of the group.
        parts = constrained(parts, tuple(P(None, *spec) for spec in batch.specs))
        keys = jax.tree.map(lambda key: jax.random.split(key, count), rng)
        zeros = jax.tree.map(jnp.zeros_like, params)
        zeros = constrained(zeros, shards.params)
        (total, after), (each, returned) = lax.scan(
            add, (zeros, model_state), (parts, keys)
        )
        gradients, passengers = combined(total, each)
        returned = dataclasses.replace(returned, model_state=after)
    after, unchanged = returned.model_state, returned.unchanged
    changes = changes_of(after, model_state, unchanged, room)
    warn_of_zeros(changes, model_state, unchanged)
    message = with_constraints(
        Message(
            gradients=travelling(gradients, settings.reduce_dtype),
            changes=travelling(changes, settings.reduce_dtype),
            passengers=passengers,
            shards=with_changes(shards, model_state, changes),
        )
    )
    _check_range(params, message)
    return message, after


def empty_message(
    params: optax.Params,
    model_state: ModelState,
    reduce_dtype: DTypeLike | None,
    shards: Shards = UNSHARDED,
) -> Message:
    """Makes a message of zeros with all changes, whose only passenger is the loss."""
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    changes = every_change(model_state)
    return Message(
        gradients=travelling(gradients, reduce_dtype),
        changes=travelling(changes, reduce_dtype),
        passengers=Passengers.of(jnp.zeros(()), None),
        shards=with_changes(shards, model_state, changes),
    )


def _in_parts(x: jax.Array, count: int) -> jax.Array:
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _check_range(params: optax.Params, message: Message) -> None:
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, message.gradients))}
    if message.weight is not None and jnp.dtype(jnp.float16) in dtypes:
        raise ValueError(
            "`reduce_dtype` and parameters must not be float16 where `loss_fn` returns"
            " a weight: gradients are multiplied by it, and float16 ends at 65,504."
            " Choose reduce_dtype=jnp.bfloat16 or jnp.float32, and keep parameters in"
            " float32, with compute_dtype=jnp.float16."
        )

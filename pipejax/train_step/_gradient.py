"""One device's own gradient, and the message it sends.

- loss scalar: `loss_fn(params, batch)`
- full form: `loss_fn(params, batch, *, model_state, rng)` returning `loss, Aux(...)`
- m microbatches: `g = 1/m sum_j g_j`, `g_j = grad f(params, batch_j)`, by `lax.scan`,
  one batch of activations in memory at a time
- weights: `sum_j W_j g_j`, which the sum of all `W_j` over devices divides
- mixed precision: the loss sees parameters in `compute_dtype`, the gradient is taken
  with respect to the master copy and has its dtype
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pipejax.mesh import AxisName
from pipejax.message import Message, Passengers, travelling

from ._loss import Loss, Returned, Unchanged, full_form, is_floating
from ._part import Part, part_of, together


def local_message(
    loss_fn: Loss,
    params: Any,
    model_state: Any,
    batch: Any,
    rng: jax.Array | None,
    *,
    axis_name: AxisName,
    microbatches: int = 1,
    compute_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> tuple[Message, Any]:
    """Runs the loss and its gradient over this device's share of the batch.

    Args:
      loss_fn: the user's loss, in the simple or the full form.
      params: pytree of floating arrays.
      model_state: passed to `loss_fn` as a keyword unless `None`.
      batch: pytree of arrays, leading axis B, a multiple of `microbatches`.
      rng: this device's key for this step, passed likewise; split over microbatches.
      axis_name: the axes of the surrounding `shard_map` that share the batch.
      microbatches: how many parts to take the gradient over, one after another.
      compute_dtype: dtype of the floating parameters and inputs inside the loss.
      reduce_dtype: dtype in which gradients travel; `None` keeps their own.

    Returns:
      The message to reduce, and the model state as this device leaves it.
    """
    full = full_form(loss_fn, compute_dtype)

    def one(batch: Any, before: Any, rng: Any) -> tuple[Part, Any, Unchanged]:
        part, returned = part_of(full, params, batch, before, rng, axis_name=axis_name)
        return part, _model_state(returned, before), returned.unchanged

    if microbatches == 1:
        part, after, unchanged = one(batch, model_state, rng)
    else:

        def add(carry: Any, inputs: Any) -> Any:
            total, before = carry
            part, after, unchanged = one(inputs[0], before, inputs[1])
            total = jax.tree.map(jnp.add, total, part.gradients)
            return (total, after), (part._replace(gradients=None), unchanged)

        parts = jax.tree.map(lambda x: _in_parts(x, microbatches), batch)
        keys = None if rng is None else jax.random.split(rng, microbatches)
        zeros = jax.tree.map(jnp.zeros_like, params)
        (total, after), (each, unchanged) = lax.scan(
            add, (zeros, model_state), (parts, keys)
        )
        part = together(total, each)
    message = Message(
        gradients=travelling(part.gradients, reduce_dtype),
        changes=travelling(_changes(after, model_state, unchanged), reduce_dtype),
        passengers=Passengers.of(part.loss, part.metrics, part.weight),
    )
    _check_range(message)
    return message, after


def empty_message(
    params: Any, model_state: Any, reduce_dtype: DTypeLike | None
) -> Message:
    """Makes a message of zeros, without a weight or metrics."""
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    changes = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if is_floating(x) else None, model_state
    )
    return Message(
        gradients=travelling(gradients, reduce_dtype),
        changes=travelling(changes, reduce_dtype),
        passengers=Passengers.of(jnp.zeros(()), None),
    )


def _in_parts(x: jax.Array, count: int) -> jax.Array:
    """Returns an array cut along its first axis into `count` equal parts."""
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _model_state(returned: Returned, before: Any) -> Any:
    """Returns the model state after a part; floating leaves as before at weight 0."""
    if returned.weight is None:
        return returned.model_state
    empty = returned.weight == 0
    return jax.tree.map(
        lambda a, b: jnp.where(empty, b, a) if is_floating(b) else a,
        returned.model_state,
        before,
    )


def _changes(after: Any, before: Any, unchanged: Unchanged) -> Any:
    """Returns what was added to each floating leaf, `None` for others.

    To a leaf that the loss returns as it was, zeros: it may hold an infinity, and
    `inf - inf` is NaN.
    """
    leaves, structure = jax.tree.flatten(before)

    def change(a: Any, b: Any, same: bool) -> Any:
        if not is_floating(b):
            return None
        return jnp.zeros_like(b) if same else a - b

    triples = zip(jax.tree.leaves(after), leaves, unchanged.leaves, strict=True)
    return jax.tree.unflatten(structure, [change(*triple) for triple in triples])


def _check_range(message: Message) -> None:
    """Raises a ValueError for weighted gradients in a dtype of small range."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(message.gradients)}
    if message.weight is not None and jnp.dtype(jnp.float16) in dtypes:
        raise ValueError(
            "`reduce_dtype` must not be float16 where `loss_fn` returns a weight:"
            " gradients travel multiplied by it, and float16 ends at 65,504. Choose"
            " reduce_dtype=jnp.bfloat16 or jnp.float32."
        )

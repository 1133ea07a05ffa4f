"""One device's own gradient, and the message it sends.

- loss scalar: `loss_fn(params, batch)`
- full form: `loss_fn(params, batch, *, model_state, rng)` returning `loss, Aux(...)`
- m microbatches: `g = 1/m sum_j grad f(params, batch_j)` by `lax.scan`, one batch of
  activations in memory at a time
- mixed precision: the loss sees parameters in `compute_dtype`, the gradient is taken
  with respect to the master copy and has its dtype
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ._state import Aux, Message

Loss = Callable[..., Any]


def local_message(
    loss_fn: Loss,
    params: Any,
    model_state: Any,
    batch: Any,
    rng: jax.Array | None,
    *,
    microbatches: int = 1,
    compute_dtype: DTypeLike | None = None,
) -> tuple[Message, Any]:
    """Runs the loss and its gradient over this device's share of the batch.

    Args:
      loss_fn: the user's loss, in the simple or the full form.
      params: pytree of floating arrays.
      model_state: passed to `loss_fn` as a keyword unless `None`.
      batch: pytree of arrays, leading axis B, a multiple of `microbatches`.
      rng: this device's key for this step, passed likewise; split over microbatches.
      microbatches: how many parts to take the gradient over, one after another.
      compute_dtype: dtype of the floating parameters and inputs inside the loss.

    Returns:
      The message to reduce, and the model state as this device leaves it.
    """
    grad_fn = jax.value_and_grad(_full_form(loss_fn, compute_dtype), has_aux=True)

    if microbatches == 1:
        (loss, aux), gradients = grad_fn(params, batch, model_state, rng)
        after, metrics = aux.model_state, aux.metrics
    else:

        def one(carry: Any, part: Any) -> Any:
            total, before = carry
            (loss, aux), gradients = grad_fn(params, part[0], before, part[1])
            total = jax.tree.map(jnp.add, total, gradients)
            return (total, aux.model_state), (loss, aux.metrics)

        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        keys = None if rng is None else jax.random.split(rng, microbatches)
        zeros = jax.tree.map(jnp.zeros_like, params)
        (total, after), reports = lax.scan(one, (zeros, model_state), (parts, keys))
        gradients = jax.tree.map(lambda g: g / microbatches, total)
        loss, metrics = jax.tree.map(lambda x: x.mean(axis=0), reports)

    message = Message(gradients, _change(after, model_state), loss, metrics)
    return _as_passengers(message), after


def moved(model_state: Any, after: Any, change: Any) -> Any:
    """`model_state` with the reduced `change` added to its floating leaves.

    The model state obeys the parameters' recursion, `s[t] = s[t-1] + d[t-K]`, where `d`
    is the mean of what the devices changed. Other leaves (counters, PRNG keys) are the
    same on every device, need no reduction, and are taken from `after` at once.
    """
    return jax.tree.map(
        lambda d, s, a: a if d is None else (s + d).astype(s.dtype),
        change,
        model_state,
        after,
        is_leaf=lambda d: d is None,
    )


def empty_message(params: Any, model_state: Any) -> Message:
    """Zeros in the form of a message without metrics."""
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    change = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if _is_floating(x) else None, model_state
    )
    return _as_passengers(Message(gradients, change, jnp.zeros(()), None))


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _change(after: Any, before: Any) -> Any:
    return jax.tree.map(
        lambda a, b: a - b if _is_floating(b) else None,
        after,
        before,
    )


def _as_passengers(message: Message) -> Message:
    """Loss, metrics and model state in the gradients' widest dtype: no bucket more."""
    dtypes = {g.dtype for g in jax.tree.leaves(message.gradients)}
    widest = max(dtypes, key=lambda d: jnp.finfo(d).bits)
    passengers = message._replace(gradients=None)
    passengers = jax.tree.map(lambda x: x.astype(widest), passengers)
    return passengers._replace(gradients=message.gradients)


def _full_form(loss_fn: Loss, compute_dtype: DTypeLike | None) -> Loss:
    """`loss_fn` as `(params, batch, model_state, rng) -> loss, Aux`, checked."""

    def full(params: Any, batch: Any, model_state: Any, rng: Any) -> Any:
        if compute_dtype is not None:
            params, batch = _cast((params, batch), compute_dtype)
        given = {"model_state": model_state, "rng": rng}
        given = {name: value for name, value in given.items() if value is not None}
        out = _called(loss_fn, params, batch, **given)
        loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, Aux())
        _check_loss(loss, aux)
        _check_metrics(aux.metrics)
        _check_model_state(aux.model_state, model_state)
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), aux.metrics)
        after = jax.tree.map(_in_dtype_of, aux.model_state, model_state)
        return jnp.asarray(loss), Aux(metrics, after)

    return full


def _called(loss_fn: Loss, *args: Any, **keywords: Any) -> Any:
    try:
        return loss_fn(*args, **keywords)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            "`loss_fn` must use axes of the mesh only:"
            f" {str(error).partition('.')[0]}. Name an axis of `mesh`, or pass a mesh"
            " that has this one."
        ) from error


def _in_dtype_of(after: Any, before: Any) -> jax.Array:
    after = jnp.asarray(after)
    # A typed PRNG key has no `astype`.
    return after if after.dtype == before.dtype else after.astype(before.dtype)


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if _is_floating(x) else x, tree)


def _check_loss(loss: Any, aux: Any) -> None:
    if not isinstance(aux, Aux):
        raise ValueError(
            "`loss_fn` must return a scalar, or a scalar and pj.Aux(metrics=...,"
            f" model_state=...); got {type(aux).__name__} in second place."
        )
    if not hasattr(loss, "shape") and not isinstance(loss, float):
        raise ValueError(
            "`loss_fn` must return a scalar, or a scalar and pj.Aux(metrics=...,"
            f" model_state=...); got {type(loss).__name__}."
        )
    if jnp.shape(loss) != ():
        raise ValueError(
            f"`loss_fn` must return a scalar, got an array of shape {jnp.shape(loss)}."
            " Average it over the examples: `loss.mean()`."
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            "`loss_fn` must return a floating scalar, got"
            f" {jnp.result_type(loss).name}. Only a real loss has a gradient."
        )


def _check_metrics(metrics: Any) -> None:
    for path, metric in jax.tree_util.tree_leaves_with_path(metrics):
        name = f"metrics{jax.tree_util.keystr(path)}"
        if jnp.shape(metric) != ():
            raise ValueError(
                "`loss_fn` must return metrics that are scalars, because they travel"
                f" with the gradients and are averaged over devices; got `{name}` of"
                f" shape {jnp.shape(metric)}. Return its mean, or leave it out: outputs"
                " such as logits are no metrics."
            )
        if jnp.iscomplexobj(metric):
            raise ValueError(
                f"`loss_fn` must return real metrics, got `{name}` of dtype"
                f" {jnp.result_type(metric).name}. Return its real and imaginary parts"
                " or its magnitude."
            )


def _check_model_state(after: Any, before: Any) -> None:
    got, given = (jax.tree.map(jnp.shape, tree) for tree in (after, before))
    if str(got) != str(given) or _structure(after) != _structure(before):
        raise ValueError(
            "`loss_fn` must return the model state in the structure and shapes that"
            f" `train.init` was given: {given}, got {got}. Return `loss,"
            " pj.Aux(model_state=...)` and call `train.init(params, model_state=...)`."
        )


def _structure(tree: Any) -> str:
    return str(jax.tree.structure(tree))

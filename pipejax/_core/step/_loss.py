"""Brings the user's loss function into one form, and checks what it returns."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from pipejax._internal.structures import alike, restructured
from pipejax._internal.types import Keys, Leaf, ModelState, Tree

from ._axis_rules import axis_rule_error, rules_of_group
from ._state import Aux

Loss = Callable[..., Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["metrics", "model_state", "weight"],
    meta_fields=["unchanged"],
)
@dataclasses.dataclass(frozen=True)
class Returned:
    """The values that a loss function returns beside its loss.

    Attributes:
      metrics: Pytree of float32 scalars.
      model_state: The new model state, in the dtypes of the model state that the loss
        function was given.
      weight: float32 scalar, or `None` if the loss function returns no weight. It is
        NaN if the loss function returns a negative weight.
      unchanged: For each leaf of the model state, whether the loss function has
        returned the same object. This is known while it is traced.
    """

    metrics: Tree
    model_state: ModelState
    weight: jax.Array | None
    unchanged: tuple[bool, ...] = ()


def full_form(loss_fn: Loss, compute_dtype: DTypeLike | None) -> Loss:
    """Returns a loss that takes all keywords by place and returns `loss, Returned`.

    Its arguments are `(params, batch, model_state, rng, shared)`. With a
    `compute_dtype`, it casts parameters, batch and `shared`.
    """

    def full(
        params: optax.Params,
        batch: Tree,
        model_state: ModelState,
        rng: Keys,
        shared: Tree = None,
    ) -> Any:
        if compute_dtype is not None:
            params, batch, shared = _cast((params, batch, shared), compute_dtype)
        # The loss gets its own copy. It may put new leaves into the dict that it is
        # passed, and Equinox marks a state that it has updated as used.
        own, shared = jax.tree.map(lambda leaf: leaf, (model_state, shared))
        passed = {"model_state": own, "rng": rng, "shared": shared}
        passed = {name: value for name, value in passed.items() if value is not None}
        try:
            with rules_of_group():
                out = loss_fn(params, batch, **passed)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise _unbound(error) from error
        except ValueError as error:
            if explained := axis_rule_error(error):
                raise explained from error
            raise
        loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, Aux())
        _check_loss(loss, aux)
        _check_metrics(aux.metrics)
        _check_model_state(aux.model_state, model_state)
        metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), aux.metrics)
        _check_casts(aux.model_state, model_state)
        returned = restructured(aux.model_state, model_state)
        after = jax.tree.map(_in_dtype_of, returned, model_state)
        pairs = zip(*map(jax.tree.leaves, (returned, model_state)), strict=True)
        unchanged = tuple(a is b for a, b in pairs)
        return jnp.asarray(loss), Returned(
            metrics, after, _checked_weight(aux.weight), unchanged
        )

    return full


def is_floating(leaf: Leaf) -> bool:
    """Returns whether the array has a floating dtype."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _unbound(error: NameError) -> ValueError:
    return ValueError(
        "`loss_fn` must use axes of the mesh only:"
        f" {str(error).partition('.')[0]}. Name an axis of `mesh`, or pass a mesh"
        " that has this one."
    )


def _in_dtype_of(after: Tree, before: Tree) -> jax.Array:
    after = jnp.asarray(after)
    # A typed PRNG key has no `astype`.
    return after if after.dtype == before.dtype else after.astype(before.dtype)


def _cast(tree: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype) if is_floating(x) else x, tree)


def _checked_weight(weight: Any) -> jax.Array | None:
    if weight is None:
        return None
    dtype = jnp.result_type(weight)
    floating = jnp.issubdtype(dtype, jnp.floating)
    real = floating or jnp.issubdtype(dtype, jnp.integer)
    if jnp.shape(weight) != () or not real:
        raise ValueError(
            "`loss_fn` must return a weight that is a real scalar, the number of tokens"
            f" or examples in the loss; got {dtype.name} of shape"
            f" {jnp.shape(weight)}. Sum it: `pj.Aux(weight=weights.sum())`."
        )
    if floating and jnp.finfo(dtype).nmant < 23:
        raise ValueError(
            "`loss_fn` must return a weight of float32, float64 or an integer dtype,"
            f" because a count is rounded in others; got {dtype.name}. If"
            " `compute_dtype` casts the mask that you count, let the batch have a"
            " boolean mask: `pj.Aux(weight=mask.sum())`."
        )
    weight = jax.lax.stop_gradient(jnp.asarray(weight).astype(jnp.float32))
    # A negative weight becomes NaN. It makes the gradients NaN, and their update is
    # skipped.
    return jnp.where(weight >= 0, weight, jnp.nan)


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


def _check_metrics(metrics: Tree) -> None:
    for path, metric in jax.tree_util.tree_leaves_with_path(metrics):
        name = f"metrics{jax.tree_util.keystr(path)}"
        number = hasattr(metric, "dtype") or isinstance(metric, bool | int | float)
        if not (number or isinstance(metric, complex)):
            raise ValueError(
                "`loss_fn` must return metrics that are numbers, because they are"
                f" averaged over devices; got `{name}` of type {type(metric).__name__}."
                " Leave it out, or return it from a function of your own."
            )
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


def _check_model_state(after: Tree, before: Tree) -> None:
    got, passed = (jax.tree.map(jnp.shape, tree) for tree in (after, before))
    shapes, wanted = (list(map(jnp.shape, jax.tree.leaves(x))) for x in (after, before))
    if not alike(after, before) or shapes != wanted:
        raise ValueError(
            "`loss_fn` must return the model state in the structure and shapes that"
            f" `train.init` was given: {passed}, got {got}. Return `loss,"
            " pj.Aux(model_state=...)` and call `train.init(params, model_state=...)`."
        )


def _check_casts(after: Tree, before: Tree) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(after)
    for (path, a), b in zip(leaves, jax.tree.leaves(before), strict=True):
        got, passed = jnp.result_type(a), jnp.result_type(b)
        for kind in (jnp.complexfloating, jnp.inexact):
            if jnp.issubdtype(got, kind) and not jnp.issubdtype(passed, kind):
                name = f"model_state{jax.tree_util.keystr(path)}"
                raise ValueError(
                    "`loss_fn` must return model state of the kind that `train.init`"
                    f" was given: `{name}` is {passed.name}, got {got.name}. Give"
                    f" `train.init` an array of dtype {got.name}, or cast it in the"
                    " loss function."
                )

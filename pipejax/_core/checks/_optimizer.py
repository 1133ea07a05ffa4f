"""Checks that the optimizer works with gradients that are averaged and delayed.

The following optimizers do not:

- optimizers that average and delay gradients themselves (`pj.pipelined_mean`)
- optimizers whose gradients have another structure than their parameters
- optimizers whose update needs more than the mean gradient, the parameters and the loss
- optimizers whose own recursion breaks under a delay
- optimizers whose state changes its structure, its shapes or its dtypes
"""

from typing import Any

import jax
import optax.contrib

from pipejax._core.message import InFlight
from pipejax._internal.structures import alike, containers, difference, paths
from pipejax._internal.types import Tree

_CANNOT_BE_GIVEN: dict[type, str] = {
    InFlight: (
        "pj.pipelined_mean, got one in its state: gradients are averaged and delayed"
        " already. Leave it out, and set `width`."
    ),
    optax.LookaheadState: (
        "optax.lookahead, whose parameters are pairs of fast and slow ones but whose"
        " gradients are of the fast ones alone; got one in its state. Keep a slow copy"
        " beside the train step, with optax.incremental_update (docs/recipes.md)."
    ),
    optax.contrib.DifferentiallyPrivateAggregateState: (
        "optax.contrib.differentially_private_aggregate, which needs the gradient of"
        " every example and would take the rows of a mean gradient for examples; got"
        " one in its state. Aggregate them in a step of your own, and give pj.pipelined"
        " the aggregate."
    ),
    optax.contrib.HutchinsonState: (
        "optax.contrib.hutchinson_estimator_diag_hessian, which needs the loss function"
        " where an update has gradients and the loss alone; got one in its state. Give"
        " optax.contrib.sophia a `hessian_diagonal_fn` that needs no more."
    ),
}


def check_optimizer(
    opt_state: optax.OptState, *, plain_delay: bool = False, local_steps: bool = False
) -> None:
    """Raises a `ValueError` if the optimizer cannot be used in a train step.

    The optimizer is recognized by the types in its state.

    `plain_delay` says whether gradients are applied late without weight prediction.
    """
    for kind, reason in _CANNOT_BE_GIVEN.items():
        if _found(opt_state, kind):
            raise ValueError(f"`tx` must not hold {reason}")
    sams = _found(opt_state, optax.contrib.SAMState)
    if any(sam.cache is None for sam in sams):
        raise ValueError(
            "`tx` must not hold optax.contrib.sam with opaque_mode=True, which takes"
            " gradients of its own inside the update, without a mean over devices."
            " Leave opaque_mode at False."
        )
    if plain_delay and sams:
        raise ValueError(
            "`tx` must not hold optax.contrib.sam where gradients are applied late"
            " without weight prediction: a delay exchanges its two kinds of steps, and"
            " it diverges. Leave out weight_prediction=False and `at_once`, which does"
            " not predict, or choose width=1."
        )
    if local_steps and sams:
        raise ValueError(
            "`tx` must not hold optax.contrib.sam in local steps, which would exchange"
            " the parameters that it has perturbed. Take it in make_train_step."
        )


def check_opt_state(
    tx: optax.GradientTransformation,
    params: optax.Params,
    opt_state: optax.OptState,
    name: str,
    remedy: str,
    argument: str = "tx",
) -> None:
    """Raises a `ValueError` unless `opt_state` has the form of `tx.init(params)`.

    `argument` is the name by which the train step was given the optimizer.
    """
    found = opt_state_difference(tx, params, opt_state, name)
    if found is None:
        return
    leaf, rule, value = found
    raise ValueError(
        f"`{name}` must be a state of this train step's `{argument}` for these"
        f" parameters: `{leaf}` {rule}; got {value} in its place. {remedy}"
    )


def opt_state_difference(
    tx: optax.GradientTransformation,
    params: optax.Params,
    opt_state: optax.OptState,
    name: str = "opt_state",
) -> tuple[str, Any, Any] | None:
    """Returns where an optimizer state differs from `tx.init(params)`, or `None`.

    The containers in the pytree must be the same, and the paths, shapes and dtypes of
    its arrays.

    The result is a path, what `tx.init(params)` has there, and what `opt_state` has.
    """
    wanted = jax.eval_shape(tx.init, params)
    if found := difference(name, wanted, opt_state):
        return found
    if alike(wanted, opt_state):
        return None
    return name, containers(wanted), containers(opt_state)


def check_kept_form(before: Tree, after: Tree) -> None:
    """Raises a `ValueError` if an update changed the form of the state."""
    was, now = ({*map(jax.tree_util.keystr, paths(x))} for x in (before, after))
    if was != now:
        path = min(was ^ now)
        raise ValueError(
            "`tx` must keep the structure of its state, which stays as it is where"
            f" nothing has arrived: got `opt_state{path}`, which is there"
            f" {'after' if path in now else 'before'} an update alone. Use"
            " optax.snapshot in place of optax.monitor, which begins without its"
            " measurements."
        )
    if found := difference("opt_state", before, after):
        leaf, form, new = found
        raise ValueError(
            "`tx` must keep the shapes and dtypes of its state, which stays as it is"
            f" where nothing has arrived: `{leaf}` is {form} before an update, got"
            f" {new} after it. Let `tx.update` cast it back, or `tx.init` begin with"
            " this form."
        )


def _found(state: Any, kind: type) -> list[Any]:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]

"""Finds the counters of an optimizer, of which delayed parameters have their own.

`_delayed` says why. A leaf of the optimizer's state is a counter if it belongs to no
parameter and an update changes it. The hyperparameters of `optax.inject_hyperparams`
are no counters: each update computes them anew, or a user may change them for both
kinds of parameters.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from pipejax._internal.structures import HYPERPARAMETERS, like_optimizer, no_leaf
from pipejax._internal.types import Tree

from ._delayed import delays
from ._state import Trainable
from ._step import Settings
from ._update import updated


def delayed_counters(settings: Settings, trained: Trainable) -> Tree:
    """Returns the counters of delayed parameters, before the first update.

    They are a pytree like the optimizer's state, with `None` in place of other leaves;
    `None` if all gradients are delayed. Must be called where `tx.update` may use its
    mesh axes.
    """
    params, opt_state = trained.params, trained.opt_state
    flags = jax.tree.leaves(delays(settings.delayed, params))
    if all(flags):
        return None
    loss = jnp.zeros((), jnp.float32)
    _, new = updated(settings.tx, no_leaf(params), opt_state, params, loss)
    owned = like_optimizer(opt_state, params, [True] * len(flags), False)
    kept = jax.tree.map(operator.is_, new, opt_state)

    def counter(path: Any, leaf: jax.Array, *no: bool) -> jax.Array | None:
        return None if any(no) or HYPERPARAMETERS in path else leaf

    return jax.tree_util.tree_map_with_path(counter, opt_state, owned, kept)

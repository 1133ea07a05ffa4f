r"""The model state in rounds: every group has its own, and all agree on one.

The leaves that the loss function changes and that can be averaged move as parameters do
with a mean outside. Let s be the model state that all agree on. With the last chunk of
a round, group i, which has `s_i`, sends its change:

$$e_i = s_i - s$$

$$s' = s + 1/p \sum_i e_i$$

$$s_i <- s_i + (s' - (s + e_i))$$

Other leaves stay with their group. Counters and keys are the same in all groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pipejax._core.message import Message, Reduced, mean_as, travelling
from pipejax._internal.types import ModelState, Tree

from ._form import Form


def changes_of(form: Form, own: ModelState, agreed: ModelState) -> Tree:
    """Returns the changes of one group, as they travel; `None` for other leaves."""

    def change(changes: bool, own: jax.Array, agreed: jax.Array) -> jax.Array | None:
        return own - agreed if changes else None

    return travelling(jax.tree.map(change, form.averages(own), own, agreed), None)


def agreed_on(
    agreed: ModelState, own: ModelState, sent: Tree, reduced: Reduced, groups: int
) -> tuple[ModelState, ModelState]:
    """Returns what all groups agree on next, and what one group has.

    `sent` are the changes that this group has sent.
    """
    nothing = Message(None)
    means = mean_as(reduced.sum.changes, agreed, nothing, groups)
    mine = mean_as(sent, agreed, nothing, 1)

    def moved(s: Any, mean: Any, x: Any) -> jax.Array:
        return x if mean is None else jnp.where(reduced.finite, s + mean, s)

    def merged(x: Any, s: Any, after: Any, e: Any) -> jax.Array:
        if e is None:
            return x
        return jnp.where(reduced.finite, x + (after - (s + e)), x)

    after = jax.tree.map(moved, agreed, means, own)
    return after, jax.tree.map(merged, own, agreed, after, mine)


def at_agreed(form: Form, own: ModelState, agreed: ModelState) -> ModelState:
    """Returns the model state of a group that has nothing left to send."""
    return jax.tree.map(
        lambda changes, x, s: s if changes else x, form.averages(own), own, agreed
    )

r"""The model state: arrays that a loss function changes, and that are not trained.

Model state follows one rule, with and without weight prediction: a device computes at
the model state to which its own K-1 changes in flight lead. Let `s_t` be the model
state, K the width, p the number of devices, and `f_i` the model state that the loss of
device i returns. Then

$$a_{i,t} = s_t + d_{i,t-K+1} + ... + d_{i,t-1}$$

$$d_{i,t} = f_i(a_{i,t}) - a_{i,t}$$

$$s_{t+1} = s_t + 1/p \sum_i d_{i,t-K+1}$$

A loss function that replaces a value (the last statistics, a singular value, a target
network) therefore gets that value, K-1 steps late, and averages move as at width 1.

There are three kinds of leaves:

- Floating and complex leaves are averaged, as above. A complex number travels as two
  real numbers.
- A leaf that the loss function returns unchanged, as the same object, is not sent. It
  is no result of the program of a step either, which would be a copy.
- Other leaves (counters, PRNG keys) are the same on every device (`_unaveraged`). They
  advance at once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pipejax._core.message import InFlight, Message, Reduced, mean_as, valid_in_queue
from pipejax._internal.shards import Shards, constrained
from pipejax._internal.structures import no_leaf
from pipejax._internal.types import Leaf, ModelState, Tree


def averaged(leaf: Leaf) -> bool:
    """Returns whether changes of a leaf of the model state are averaged over devices.

    Dtypes of fewer than 16 bits, in which no sum is exact, are not averaged.
    """
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return True
    return jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits >= 16


def predicted_model_state(
    model_state: ModelState,
    in_flight: InFlight,
    shards: Shards,
    *,
    skip_nonfinite: bool,
) -> ModelState:
    """Returns the model state to which this device's own changes in flight lead."""
    for own, valid in zip(in_flight.pending, valid_in_queue(in_flight), strict=True):
        if not jax.tree.leaves(own.changes):
            continue  # whether the gradients are finite does not matter then
        reduced = Reduced.of(own, valid)
        applied = reduced.usable if skip_nonfinite else reduced.counts
        changes = mean_changes(own, model_state, 1)
        new = moved(model_state, no_leaf(model_state), changes)
        model_state = jax.tree.map(
            lambda s, n, applied=applied: s if n is None else jnp.where(applied, n, s),
            model_state,
            new,
        )
    return constrained(model_state, shards.model_state)


def changes_of(after: Tree, before: Tree, unchanged: tuple[bool, ...]) -> Tree:
    """Returns the change of each averaged leaf that the loss function changes.

    `None` takes the place of other leaves. (A leaf that is returned unchanged may hold
    an infinity, and the difference `inf - inf` would be NaN.)
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(before)

    def change(path: Any, b: Any, a: Any, same: bool) -> Any:
        _check_averaged(path, b, same=same)
        return None if same or not averaged(b) else a - b

    found = zip(leaves, jax.tree.leaves(after), unchanged, strict=True)
    return jax.tree.unflatten(
        structure, [change(*leaf, a, same) for leaf, a, same in found]
    )


def counters_of(after: Tree, before: Tree, unchanged: tuple[bool, ...]) -> Tree:
    """Returns the leaves that advance at once, and `None` in place of other leaves."""
    leaves, structure = jax.tree.flatten(before)
    found = zip(leaves, jax.tree.leaves(after), unchanged, strict=True)
    return jax.tree.unflatten(
        structure, [None if same or averaged(b) else a for b, a, same in found]
    )


def every_change(model_state: ModelState) -> Tree:
    """Returns a change of zero for each averaged leaf, and `None` for other leaves."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if averaged(x) else None, model_state
    )


def moved(model_state: ModelState, counters: Tree, changes: Tree) -> Tree:
    """Returns the leaves that a step moves, and `None` in place of other leaves.

    The mean `changes` are added to leaves that have one. Others have `counters` by what
    the loss of this device did.
    """
    return jax.tree.map(
        lambda s, a, d: a if d is None else s + d, model_state, counters, changes
    )


def unmoved(model_state: ModelState, counters: Tree, changes: Tree) -> Tree:
    """Returns the same leaves after a step that applies no change."""
    return jax.tree.map(
        lambda s, a, d: a if d is None else s, model_state, counters, changes
    )


def mean_changes(message: Message, model_state: ModelState, devices: int) -> Tree:
    """Returns the mean changes over devices, whatever the weights of the devices."""
    return mean_as(message.changes, model_state, Message(message.gradients), devices)


def _check_averaged(path: Any, leaf: Leaf, *, same: bool) -> None:
    small = jnp.issubdtype(leaf.dtype, jnp.inexact) and not averaged(leaf)
    if small and not same:
        raise ValueError(
            "`loss_fn` must not change model state of a floating dtype below 16 bits,"
            " whose changes cannot be averaged over devices; got"
            f" `model_state{jax.tree_util.keystr(path)}` of dtype {leaf.dtype.name}."
            " Keep it in float32 or bfloat16, and cast it in the loss function."
        )

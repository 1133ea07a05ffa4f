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
- A leaf that the loss function returns unchanged, as the same object, is not sent.
- Other leaves (counters, PRNG keys) are the same on every device. They advance at once.
"""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from pipejax._core.message import InFlight, Message, Reduced, mean_as, valid_in_queue
from pipejax._internal.shards import Shards, constrained
from pipejax._internal.structures import paths
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
        model_state = jax.tree.map(
            lambda new, old, applied=applied: jnp.where(applied, new, old),
            moved(model_state, model_state, changes),
            model_state,
        )
    return constrained(model_state, shards.model_state)


def changes_of(
    after: Tree, before: Tree, unchanged: tuple[bool, ...], room: Tree
) -> Tree:
    """Returns the change of each averaged leaf, and `None` in place of other leaves.

    A leaf that the loss function returns unchanged has no change, unless the queue has
    room for one. It is then zero. (Such a leaf may hold an infinity, and the difference
    `inf - inf` would be NaN.)

    `room` has the changes for which the queue has room, with `None` in place of other
    leaves.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(before)
    kept = paths(room)

    def change(path: Any, b: Any, a: Any, same: bool) -> Any:
        _check_averaged(path, b, same=same)
        if not averaged(b) or (same and path not in kept):
            return None
        return jnp.zeros_like(b) if same else a - b

    found = zip(leaves, jax.tree.leaves(after), unchanged, strict=True)
    return jax.tree.unflatten(
        structure, [change(*leaf, a, same) for leaf, a, same in found]
    )


def every_change(model_state: ModelState) -> Tree:
    """Returns a change of zero for each averaged leaf, and `None` for other leaves."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if averaged(x) else None, model_state
    )


def moved(model_state: ModelState, after: Tree, changes: Tree) -> ModelState:
    """Returns `model_state` with the mean `changes` added to the leaves that have one.

    Leaves that are neither floating nor complex are taken from `after`, the model state
    as this device's loss has left it.
    """

    def leaf(d: Any, s: Any, a: Any) -> Any:
        if d is not None:
            return s + d
        still = s is None or jnp.issubdtype(s.dtype, jnp.inexact)
        return s if still else a

    return jax.tree.map(leaf, changes, model_state, after, is_leaf=lambda d: d is None)


def unmoved(model_state: ModelState, after: Tree) -> ModelState:
    """Returns the model state after a step that applies no change."""
    return moved(model_state, after, jax.tree.map(lambda _: None, model_state))


def mean_changes(message: Message, model_state: ModelState, devices: int) -> Tree:
    """Returns the mean changes over devices, whatever the weights of the devices."""
    like = jax.tree.map(
        lambda d, s: None if d is None else s,
        message.changes,
        model_state,
        is_leaf=lambda d: d is None,
    )
    unweighted = Message(message.gradients)
    return mean_as(message.changes, like, unweighted, devices)


def with_changes(shards: Shards, model_state: ModelState, changes: Tree) -> Shards:
    """Returns how a group shards a message that has these changes."""
    leaves, there = jax.tree_util.tree_leaves_with_path(model_state), paths(changes)
    specs = shards.model_state and tuple(
        spec
        for (path, _), spec in zip(leaves, shards.model_state, strict=True)
        if path in there
    )
    return dataclasses.replace(shards, changes=specs)


def warn_of_zeros(changes: Tree, before: Tree, unchanged: tuple[bool, ...]) -> None:
    """Warns of changes that are always zero, but travel because the queue has room.

    Must be called while a step is traced, and so warns once for each program.
    """
    sent, leaves = paths(changes), jax.tree_util.tree_leaves_with_path(before)
    pairs = zip(leaves, unchanged, strict=True)
    still = [leaf for leaf, same in pairs if same and leaf[0] in sent]
    if still:
        size = sum(leaf.size * leaf.dtype.itemsize for _, leaf in still)
        more = f" and {len(still) - 1} more leaves" if len(still) > 1 else ""
        warnings.warn(
            f"`loss_fn` returns `model_state{jax.tree_util.keystr(still[0][0])}`{more}"
            f" unchanged: {size} bytes, which are sent in every step all the same,"
            " because `train.init` was not given a batch that shows it. Call"
            " `train.init(params, ..., batch=batch)`.",
            stacklevel=2,
        )


def _check_averaged(path: Any, leaf: Leaf, *, same: bool) -> None:
    small = jnp.issubdtype(leaf.dtype, jnp.inexact) and not averaged(leaf)
    if small and not same:
        raise ValueError(
            "`loss_fn` must not change model state of a floating dtype below 16 bits,"
            " whose changes cannot be averaged over devices; got"
            f" `model_state{jax.tree_util.keystr(path)}` of dtype {leaf.dtype.name}."
            " Keep it in float32 or bfloat16, and cast it in the loss function."
        )

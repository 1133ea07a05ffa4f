"""Saving a state, or refusing it while nothing has been written yet."""

import hashlib
import json
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from pipejax.mesh import without_mesh
from pipejax.message import width_of
from pipejax.reshard import Spread
from pipejax.train_step import PipelineState

from ._json_values import json_copy
from ._leaves import encoded, form, is_weak, named
from ._manager import steps


def save(
    manager: ocp.CheckpointManager,
    state: PipelineState,
    extras: dict[str, Any] | None = None,
) -> None:
    """Saves the state under its step, with gradients in flight and PRNG key.

    Returns once the state may be donated and the extras changed; the manager writes on
    beside the training. `manager.wait_until_finished()` waits for it, and raises what
    it failed with, as the next `save` does. What was saved before is still there then.

    On several processes all of them call it, at the same step and with the same extras,
    after `train.join()`.

    Args:
      manager: what `manager(folder)` returned.
      state: what `train.step` returned, at a later step than all that is in the folder.
      extras: saved with it, such as the data iterator's state. A dict of what JSON
        gives back unchanged: dicts with string keys, lists, and Python's own strings,
        numbers, bools and None.

    Raises:
      ValueError: before anything is written, if `state` is not what a step returned,
        has been donated or is of no later step, or if `extras` would not come back as
        they are or differ between processes.
    """
    _check_state(state)
    extras = json_copy("extras", {} if extras is None else extras)
    step = int(jax.device_get(state.step))
    # What is saved has to come to the host: the caller has asked for that transfer.
    with without_mesh(), jax.transfer_guard("allow"):
        _check_same_everywhere(step, extras)
        _check_later(manager, step)
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_arrays(state)),
                meta=ocp.args.JsonSave(_meta(state)),
                extras=ocp.args.JsonSave(extras),
            ),
        )


def _meta(state: PipelineState) -> dict[str, Any]:
    """Returns what `restore` has to know before it reads the arrays."""
    leaves = named(state)
    return {
        "width": width_of(state.in_flight),
        "spread": Spread.of(state)._asdict(),
        "calls": None if state.calls is None else int(state.calls),
        "leaves": {name: form(leaf) for name, leaf in leaves.items()},
        "weak": [name for name, leaf in leaves.items() if is_weak(leaf)],
    }


def _arrays(state: PipelineState) -> dict[str, jax.Array]:
    """Returns copies of all that is written, by name."""
    leaves = named(state._replace(calls=None))
    return {k: _copied(encoded(leaf)) for k, leaf in leaves.items() if leaf.size}


def _copied(array: jax.Array) -> jax.Array:
    """Returns a copy, NaN and infinities too.

    On CPU Orbax would otherwise read, after `save` returns, from memory that a donating
    step may already be overwriting.
    """
    with jax.debug_nans(False), jax.debug_infs(False):
        return jnp.copy(array)


def _check_state(state: Any) -> None:
    """Every leaf is an array that all processes hold, and still there."""
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the pj.PipelineState that `train.step` returned, got"
            f" {type(state).__name__}. Save `train.init(params)` of parameters alone."
        )
    for name, leaf in named(state._replace(calls=None)).items():
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"`state` must not be traced, got {name} as a tracer. Call"
                " pipejax.checkpoint.save outside jit and scan."
            )
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"`state` must hold jax.Arrays, got {name} of type"
                f" {type(leaf).__name__}. {_PLACE}"
            )
        if leaf.is_deleted():
            raise ValueError(
                f"`state` must still have its arrays, got {name} deleted: a step made"
                " with donate=True was given this state. Save what that step returned,"
                " or save before it."
            )
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"`state` must lie on the devices of all {jax.process_count()}"
                f" processes, got {name} on this one's alone. {_PLACE}"
            )


_PLACE = "Place it with jax.device_put(leaf, NamedSharding(train.mesh, P()))."


def _check_later(manager: ocp.CheckpointManager, step: int) -> None:
    """The step is later than those of all checkpoints in the folder."""
    latest = max(steps(manager), default=-1)
    if step <= latest:
        raise ValueError(
            "`state` must be of a later step than the checkpoints in"
            f" {manager.directory}, got step {step} where the latest is of step"
            f" {latest}. A step is saved once: ask `manager.latest_step()` first. Save"
            " what follows on an earlier step, or a drained state, in another folder,"
            f" or remove what is in its way: `manager.delete({latest})`."
        )


def _check_same_everywhere(step: int, extras: dict[str, Any]) -> None:
    """All processes save the same: what is written is process 0's."""
    if jax.process_count() == 1:
        return
    text = json.dumps([step, extras], sort_keys=True)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    found = multihost_utils.process_allgather(digest)
    others = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    if others:
        raise ValueError(
            "`extras` and `state.step` must be the same on all processes, for process 0"
            f" writes its own; got others on processes {others}. Here they are step"
            f" {step} and {reprlib.repr(extras)}. Save what holds for the whole job,"
            " such as the number of global batches that are gone."
        )

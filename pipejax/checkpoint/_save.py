"""Saves a state, or raises an error before anything is written."""

import os
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from pipejax._core.executors import join
from pipejax._internal import timeline
from pipejax._internal.checksums import checksums
from pipejax._internal.mesh import without_mesh
from pipejax.train_step import LocalState, PipelineState

from ._extras import filled, packed
from ._fault import all_or_none, writing_to
from ._leaves import encoded, named
from ._manager import check_manager, is_read_only, keeper_of, steps
from ._meta import digest, meta_of


def save(
    manager: ocp.CheckpointManager,
    state: PipelineState | LocalState,
    extras: dict[str, Any] | None = None,
) -> None:
    """Saves a state with what is in flight, as the checkpoint of its step.

    When `save` returns, the state may be donated and the extras may be changed. The
    manager writes the checkpoint while the training continues. If the write fails, the
    next `save` or `manager.wait_until_finished()` raises the error, and the checkpoints
    before it remain.

    All processes must call `save` at the same step, with the same extras, apart from
    values in a `PerProcess`. `save` first waits for the reductions under way.

    Args:
      manager: The manager that `pipejax.checkpoint.manager(folder)` has returned.
      state: A state that `train.init`, `train.step` or `train.drain` has returned. Its
        step must be later than the steps of all checkpoints in the folder.
      extras: A dict to save with the state, such as the position of the data iterator.
        JSON must return it unchanged: dicts with string keys, lists, and Python's own
        strings, numbers, bools and None. It may also hold bytes, and `PerProcess` marks
        values that differ between processes. `None` saves an empty dict.

    Raises:
      OSError: Before anything is written, if the folder cannot be written to.
      ValueError: Before anything is written, if `manager` is closed or read-only; if
        `state` is traced, donated, not on all processes or not of a later step; if JSON
        would change `extras`; or if step or extras differ between processes.
      RuntimeError: If Orbax has not made the checkpoint.
    """
    began = timeline.now()
    check_manager(manager)
    check_state(state)
    shared, own = packed({} if extras is None else extras)
    step = step_of(state)
    # The caller has asked for the transfer of the state to the host.
    join()  # Orbax has collectives of its own.
    with without_mesh(), jax.transfer_guard("allow"):
        _check_same_everywhere(step, shared)
        kept = filled(shared, own)
        _check_later(manager, step)
        _check_writable(manager)
        arrays = _arrays(state)
        meta = meta_of(state, step, kept, checksums(arrays))
        made = manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                meta=ocp.args.JsonSave(meta),
                extras=ocp.args.JsonSave(kept),
            ),
        )
    if not made:
        raise RuntimeError(
            f"Orbax has not saved step {step} in {manager.directory}. Use a manager"
            " that pipejax.checkpoint.manager has returned."
        )
    timeline.note("saved", seconds=timeline.now() - began)


def step_of(state: PipelineState | LocalState) -> int:
    # All groups have taken the same number of steps.
    step = state.local.step if isinstance(state, LocalState) else state.step
    return int(np.ravel(jax.device_get(step.addressable_data(0)))[0])


def _arrays(state: PipelineState | LocalState) -> dict[str, jax.Array]:
    leaves = on_devices(state)
    return {k: _copied(encoded(leaf)) for k, leaf in leaves.items() if leaf.size}


def on_devices(state: PipelineState | LocalState) -> dict[str, Any]:
    """Returns the leaves of a state by name, without numbers kept on the host."""
    kept: dict[str, Any] = {"calls": None}
    if isinstance(state, LocalState):
        kept = {"position": None}
    return named(state._replace(**kept))


def _copied(array: jax.Array) -> jax.Array:
    # On CPU, Orbax reads the memory of an array after `save` has returned. Without the
    # copy, a step with `donate=True` could overwrite this memory before. The copy of a
    # NaN is no error, so the two checks are off.
    with jax.debug_nans(False), jax.debug_infs(False):
        return jnp.copy(array)


def check_state(state: Any) -> None:
    if not isinstance(state, PipelineState | LocalState):
        raise ValueError(
            "`state` must be the pj.PipelineState or pj.LocalState that `train.step`"
            f" returned, got {type(state).__name__}. For parameters alone, save"
            " `train.init(params)`."
        )
    for name, leaf in on_devices(state).items():
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
                f"`state` must still have its arrays, got {name} deleted: a train step"
                " with donate=True has taken this state. Save the state that this step"
                " has returned, or save before the step."
            )
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"`state` must lie on the devices of all {jax.process_count()}"
                f" processes, got {name} on those of this process only. {_PLACE}"
            )


_PLACE = "Place it with jax.device_put(leaf, NamedSharding(train.mesh, P()))."


def _check_later(manager: ocp.CheckpointManager, step: int) -> None:
    latest = max(steps(manager), default=-1)
    keeper = keeper_of(manager)
    newest = keeper.newest() if keeper else None
    if keeper and newest is not None and latest < step <= newest:
        raise ValueError(
            "`state` must be of a later step than the snapshots of this job, got step"
            f" {step} where the newest is of step {newest}. Restore with the manager"
            f" that has `memory`, or remove {keeper.memory.path} on every host."
        )
    if step <= latest:
        raise ValueError(
            "`state` must be of a later step than the checkpoints in"
            f" {manager.directory}, got step {step} where the latest is of step"
            f" {latest}. A step can be saved only once: check `manager.latest_step()`"
            " first. Use another folder for a drained state of the same step and for a"
            " run that continues from an earlier step, or remove the later checkpoint:"
            f" `manager.delete({latest})`."
        )


def _check_writable(manager: ocp.CheckpointManager) -> None:
    if is_read_only(manager):
        raise ValueError(
            "`manager` must be allowed to save, got one with read_only=True. Leave"
            " `read_only` out."
        )

    # If a folder cannot be made, Orbax raises an error too, and then keeps the process
    # from ending.
    def probe() -> None:
        if jax.process_index() == 0:
            path = manager.directory / ".probe"
            with writing_to(manager.directory):
                if "://" in os.fspath(path):  # buckets have no empty folders
                    path.write_text("")
                    path.unlink()
                else:
                    path.mkdir(exist_ok=True)
                    path.rmdir()

    all_or_none(probe)


def _check_same_everywhere(step: int, extras: dict[str, Any]) -> None:
    if jax.process_count() == 1:
        return
    own = np.frombuffer(bytes.fromhex(digest([step, extras])), np.uint8)
    found = multihost_utils.process_allgather(own)
    others = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    if others:
        raise ValueError(
            "`extras` and `state.step` must be the same on all processes, because only"
            f" those of process 0 are written; got others on processes {others}. On"
            f" this process they are {reprlib.repr(extras)} and {step}. Save values"
            " that hold for the whole job, such as the number of global batches so far,"
            " and mark others: pipejax.checkpoint.PerProcess(value)."
        )

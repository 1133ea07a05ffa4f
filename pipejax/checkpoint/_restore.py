"""Restores a state from a checkpoint, exactly or with a drain."""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp

from pipejax._core.executors import join
from pipejax._core.rounds import Arrival
from pipejax._internal import timeline
from pipejax._internal.integers import is_integer
from pipejax._internal.mesh import without_mesh
from pipejax.train_step import (
    LocalState,
    LocalTrainStep,
    PipelineState,
    StepInfo,
    TrainStep,
)

from ._check_like import form_of, rounds_form_of
from ._choose import whole
from ._extras import unpacked
from ._fault import Fault
from ._manager import check_manager, keeper_of, steps
from ._pipeline_form import wanted_of_pipeline
from ._pipeline_state import pipeline_state
from ._read import Choose, Saved, read_step
from ._rounds import rounds_state, wanted_of_rounds
from ._snapshots import from_memory

State = TypeVar("State", PipelineState, LocalState)


class Restored(NamedTuple, Generic[State]):
    """The contents of a checkpoint, as `restore` returns them.

    Attributes:
      state: The `pj.PipelineState`, or `pj.LocalState`, to continue from.
      extras: The extras that `save` was given. Each `PerProcess` has the value of the
        process of the same rank.
      drained: Whether `restore` has applied what was in flight, because the number of
        devices or groups has changed, or the next step is in a warm-up.
      infos: What the drain has reported, as `train.drain` returns it.
    """

    state: State
    extras: dict[str, Any]
    drained: bool
    infos: tuple[StepInfo, ...] | tuple[Arrival, ...]


@without_mesh()
@jax.transfer_guard("allow")
def restore(
    manager: ocp.CheckpointManager,
    train: TrainStep | LocalTrainStep,
    like: State,
    step: int | None = None,
) -> Restored[State]:
    """Restores a state from a checkpoint, onto the mesh of `train`.

    On the same number of devices, every leaf has the dtype and the bits that were
    saved, and the gradients in flight stay in flight. If `warmup_steps` is longer now
    and the next step has no delay, they are applied first. On another number of
    devices, each gradient in flight is averaged over the old devices and applied (a
    drain), so that the next `width - 1` steps apply nothing. The states of codecs, such
    as the residuals of error feedback, begin anew, and a log record of level WARNING
    names their arrays.

    If the number of devices is the same, but inner axes or the axes of a hierarchical
    all-reduce have other sizes, or parameters are split in another way, only the states
    of codecs begin anew.

    A state of local steps continues inside its round. On another number of groups, all
    groups first exchange what they have changed, as in a drain. The new groups begin
    there, with the mean of the inner optimizers' states. `overlap_steps`, inner axes
    and the split of parameters must be those of the checkpoint.

    The loss function must return the same values, under the same names, as the one
    whose gradients are in flight. After a `train.drain`, nothing is in flight, and the
    loss function and `reduce_dtype` may be others.

    Every leaf and the extras are checked against the checksums that `save` has written.
    If `step` is `None` and the latest checkpoint is damaged, `restore` takes the newest
    one that is whole, the same on all processes, and logs which steps are damaged and
    how. Process 0 renames the folders of these steps to `damaged-STEP`, so that they
    can be saved again, unless the manager is read-only.

    If the manager has `memory`, and a snapshot there is of a later step than the newest
    checkpoint that is whole, it is restored in place of the checkpoint, unless it is of
    other devices. With `step`, a snapshot of this step is taken if there is no
    checkpoint of it that is whole.
    Snapshots that this manager has made count, too; `manager.latest_step()` leaves them
    out.

    `restore` waits for a running save and a snapshot under way. It also finds
    checkpoints that another manager has saved in the folder, and takes the next one if
    that manager deletes one.

    Args:
      manager: The manager that `pipejax.checkpoint.manager(folder)` has returned.
      train: The train step, or local step, that continues the run, of the width that
        was saved.
      like: A `pj.PipelineState`, or `pj.LocalState`, with the structure, shapes and
        dtypes of the state to restore, such as `train.init(...)` or
        `train.abstract_state(...)`. Its values are not used.
      step: The step of the checkpoint. `None` takes the newest that is whole.

    Returns:
      A `Restored` with the state, the extras, and what a drain has reported.

    Raises:
      FileNotFoundError: If there is no checkpoint, or none of this step.
      ValueError: If an argument breaks its rule; if the checkpoint has another width,
        optimizer or kind of optimizer (sharded or not) than `train`, another form than
        `like`, or values of another loss function in flight; if an earlier version of
        pipejax has written it; or if the checkpoint of `step` is damaged, or, with
        `step=None`, every checkpoint is.
      OSError: If a checkpoint cannot be read although it may be whole, or if one after
        the other is deleted while it is read.

    Examples:
      >>> import tempfile
      >>> import optax
      >>> import pipejax as pj
      >>> from pipejax import checkpoint
      >>> loss_fn = lambda w, batch: ((w - batch) ** 2).mean()
      >>> train = pj.make_train_step(loss_fn, optax.sgd(0.25), mesh=pj.data_mesh(1))
      >>> state = train.init(jax.numpy.float32(3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with checkpoint.manager(folder) as manager:
      ...         checkpoint.save(manager, state, {"next_index": 640})
      ...         restored = checkpoint.restore(manager, train, state)
      >>> float(restored.state.params), restored.extras, restored.drained
      (3.0, {'next_index': 640}, False)
    """
    began = timeline.now()
    check_manager(manager)
    _check_step(step)
    choose, continued = _kind(train, like)
    join()  # Orbax runs collectives, which must not meet those of the exchange.
    saved = _newest(manager, choose, step)
    state, drained, infos = continued(saved)
    timeline.note("restored", seconds=timeline.now() - began)
    return Restored(state, unpacked(saved.extras), drained, infos)


def _newest(manager: ocp.CheckpointManager, choose: Choose, step: int | None) -> Saved:
    """Returns a checkpoint, or a snapshot if there is one that no checkpoint replaces.

    Without a `step`, it is the newest of all that are whole.
    """
    keeper = keeper_of(manager)
    if keeper is None:
        return whole(manager, step, lambda n: read_step(manager, choose, n))
    saved = {*steps(manager)}
    newest = max(saved, default=-1)

    def kept(wants: Callable[[int], bool]) -> Saved | None:
        return from_memory(keeper, choose, wants)

    def read(number: int) -> Saved | Fault:
        found = None
        if step is None and number < newest:  # newer ones are damaged
            found = kept(lambda other: other > number)
        return found or read_step(manager, choose, number)

    found = kept(
        lambda other: other > newest if step is None else other in {step} - saved
    )
    if found is None and step is None and not saved and keeper.newest() is not None:
        raise FileNotFoundError(
            f"`manager` must have a checkpoint, got none in {manager.directory}, and"
            f" snapshots in {keeper.memory.path} that cannot be read or are of other"
            " devices. Start the job on the same devices as before, or remove this"
            " folder on every host, and the job begins anew."
        )
    if found is None:
        found = whole(
            manager, step, read, lambda: kept(lambda other: step in (None, other))
        )
    keeper.restored()
    return found


def _kind(train: Any, like: Any) -> tuple[Choose, Callable[[Saved], Any]]:
    """Returns what a train step reads, and how it continues from what was read."""
    if isinstance(train, LocalTrainStep):
        rounds = rounds_form_of(like, train)
        return (
            functools.partial(wanted_of_rounds, train, rounds),
            functools.partial(rounds_state, train, rounds),
        )
    form = form_of(like, train)
    return (
        functools.partial(wanted_of_pipeline, train, form),
        functools.partial(pipeline_state, train, form),
    )


def _check_step(step: Any) -> None:
    if step is not None and not is_integer(step, 0):
        raise ValueError(
            f"`step` must be an integer of at least 0, or None, got {step!r}. None"
            " restores the newest checkpoint."
        )

"""Restores a state from a checkpoint, exactly or with a drain."""

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from pipejax._core.executors import codec_states, in_flight_shardings, state_shardings
from pipejax._core.step import common_of
from pipejax._internal.integers import is_integer
from pipejax._internal.mesh import axes, without_mesh
from pipejax.train_step import (
    PipelineState,
    StepInfo,
    TrainStep,
)

from ._check_like import form_of
from ._choose import whole
from ._leaves import decoded, named, part_of, weakened
from ._manager import check_manager
from ._read import CODECS, MEAN, QUEUE, Saved, read_step
from ._reshard import reshard

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The contents of a checkpoint, as `restore` returns them.

    Attributes:
      state: The `pj.PipelineState` to continue from.
      extras: The extras that `save` was given.
      drained: Whether `restore` has applied the gradients in flight, because the number
        of devices has changed.
      infos: The `pj.StepInfo` of each of these gradients.
    """

    state: PipelineState
    extras: dict[str, Any]
    drained: bool
    infos: tuple[StepInfo, ...]


@without_mesh()
@jax.transfer_guard("allow")
def restore(
    manager: ocp.CheckpointManager,
    train: TrainStep,
    like: PipelineState,
    step: int | None = None,
) -> Restored:
    """Restores a state from a checkpoint, onto the mesh of `train`.

    On the same number of devices, every leaf has the dtype and the bits that were
    saved, and the gradients in flight stay in flight. On another number of devices,
    each gradient in flight is averaged over the old devices and applied (a drain), so
    that the next `width - 1` steps apply nothing. The states of codecs, such as the
    residuals of error feedback, begin anew, and a log record of level WARNING names
    their arrays.

    If the number of devices is the same, but inner axes or the axes of a hierarchical
    all-reduce have other sizes, or parameters are split in another way, only the states
    of codecs begin anew.

    The loss function must return the same values, under the same names, as the one
    whose gradients are in flight. After a `train.drain`, nothing is in flight, and the
    loss function and `reduce_dtype` may be others.

    Every leaf and the extras are checked against the checksums that `save` has written.
    If `step` is `None` and the latest checkpoint is damaged, `restore` takes the newest
    one that is whole, the same on all processes, and logs which steps are damaged and
    how. Process 0 renames the folders of these steps to `damaged-STEP`, so that they
    can be saved again, unless the manager is read-only.

    `restore` waits for a running save. It also finds checkpoints that another manager
    has saved in the folder, and takes the next one if that manager deletes one.

    Args:
      manager: The manager that `pipejax.checkpoint.manager(folder)` has returned.
      train: The train step that continues the run, of the width that was saved.
      like: A `pj.PipelineState` with the structure, shapes and dtypes of the state to
        restore, such as `train.init(...)` or `train.abstract_state(...)`. Its values
        are not used.
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
    check_manager(manager)
    _check_step(step)
    wanted = form_of(like, train)
    train.join()  # Orbax runs collectives, which must not meet those of the exchange.
    saved = whole(manager, step, lambda n: read_step(manager, train, wanted, n))
    before, now = saved.devices, train.config.devices
    state = _rebuilt(saved.arrays, saved.form, saved.meta)
    if MEAN in saved.anew:
        state = _with_new_mean(train, state, wanted)
    if before != now:
        state = reshard(train, state, before)
    if QUEUE in saved.anew:
        state = _with_empty_queue(train, state, wanted)
    if CODECS in saved.anew:
        state = _with_new_codec_states(train, state, saved)
    infos: tuple[StepInfo, ...] = ()
    moved = before != now and train.width > 1
    if moved:
        _log.warning(
            "checkpoint of %d devices restored on %d: gradients in flight are applied"
            " first",
            before,
            now,
        )
        state, infos = train.drain(state)
    return Restored(state, saved.extras, moved, infos)


def _check_step(step: Any) -> None:
    if step is not None and not is_integer(step, 0):
        raise ValueError(
            f"`step` must be an integer of at least 0, or None, got {step!r}. None"
            " restores the newest checkpoint."
        )


def _with_empty_queue(
    train: TrainStep, state: PipelineState, wanted: PipelineState
) -> PipelineState:
    form = wanted.in_flight._replace(codec_states={})
    data = axes(train.axis_name)
    shardings = in_flight_shardings(form, train.config, data)
    pending = _zeros(form.pending, shardings.pending)
    return state._replace(in_flight=state.in_flight._replace(pending=pending))


def _with_new_mean(
    train: TrainStep, state: PipelineState, wanted: PipelineState
) -> PipelineState:
    common = state_shardings(common_of(wanted), train.mesh, train.axis_name)
    mean = _zeros(wanted.mean, common.trainable.mean)
    if mean is not None:
        # With a sharded optimizer, an unknown mean says that its state is new.
        mean = mean._replace(known=mean.known | bool(state.shards.data_axes))
    slopes = _zeros(wanted.slopes, common.trainable.slopes)
    trained = state.trainable._replace(mean=mean, slopes=slopes)
    return state._replace(trainable=trained)


def _zeros(form: Any, shardings: Any) -> Any:
    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form)

    return jax.jit(zeros, out_shardings=shardings)()


def _with_new_codec_states(
    train: TrainStep, state: PipelineState, saved: Saved
) -> PipelineState:
    if lost := [name for name in saved.meta["leaves"] if part_of(name, (CODECS,))]:
        _log.warning(
            "checkpoint of other devices, or of other shards of the model: residuals of"
            " error feedback start from zero, and PRNG keys and warm starts of codecs"
            " begin anew. Not restored: %s",
            ", ".join(lost),
        )
    states = codec_states(train.phases, train.executor.reduction_mesh, state)
    return state._replace(in_flight=state.in_flight._replace(codec_states=states))


def _rebuilt(
    arrays: dict[str, jax.Array], target: PipelineState, meta: dict[str, Any]
) -> PipelineState:
    shapes, calls = target._replace(calls=None), meta["calls"]
    leaves = {name: decoded(arrays[name], leaf) for name, leaf in named(shapes).items()}
    weak = (name for name in meta["weak"] if name in leaves)
    leaves |= {name: weakened(leaves[name]) for name in weak}
    state = jax.tree.unflatten(jax.tree.structure(shapes), leaves.values())
    return state._replace(calls=None if calls is None else np.int32(calls))

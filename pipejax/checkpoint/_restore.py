"""Restores a state from a checkpoint, exactly or with a drain."""

import functools
import logging
import operator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.mesh import without_mesh
from pipejax.reshard import Spread, reshard, shapes_on
from pipejax.train_step import PipelineState, StepInfo, TrainStep

from ._leaves import Form, decoded, empty, encoded, form, named, weakened
from ._manager import steps

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The contents of a checkpoint, as `restore` returns them.

    Attributes:
      state: The `pj.PipelineState` to continue from.
      extras: The extras that `save` was given.
      drained: Whether `restore` has applied the gradients in flight, because the number
        of devices has changed.
      infos: The `pj.StepInfo` of each gradient that `restore` has applied, as
        `train.drain` returns them; empty if `drained` is false.
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
    saved, and the gradients in flight stay in flight. On another number of devices:

    - Parameters, optimizer state, PRNG key and step have the bits that were saved.
    - Then each gradient in flight is averaged over the old devices and applied (a
      drain). The next `width - 1` steps apply nothing, because the pipeline fills
      again.
    - The residuals of error feedback are redistributed in equal shares, so that they
      add the same to the mean gradient as they would have before.
    - The PRNG keys and warm starts of codecs, and the deviations that
      `deviation_feedback` keeps, begin anew.

    If the number of devices is the same but the axes of a hierarchical all-reduce have
    other sizes, only the residuals, PRNG keys and warm starts of codecs change in this
    way.

    `restore` waits for a running save. It also finds checkpoints that another manager
    has saved in the same folder.

    Args:
      manager: The manager that `pipejax.checkpoint.manager(folder)` has returned.
      train: The train step that continues the run, of the width that was saved.
      like: A `pj.PipelineState` with the structure, shapes and dtypes of the state to
        restore, such as `train.init(...)` or its `jax.eval_shape`. Its values are not
        used.
      step: The step of the checkpoint to restore; `None` takes the latest.

    Returns:
      A `Restored` with the state, the extras, and what a drain has reported.

    Raises:
      FileNotFoundError: If there is no checkpoint, or none of this step.
      ValueError: If the checkpoint has another width than `train` or another form than
        `like`, or if this version of `pipejax.checkpoint.save` has not written it.

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
    form_like = _form(like)
    train.join()  # Orbax runs collectives, which must not meet those of the exchange.
    step = _found(manager, step)
    meta = _meta(manager, step)
    _check_width(manager, meta, train)
    before, now = Spread(**meta["spread"]), Spread.now(train, form_like)
    same = before.same_as(now, train)
    target = form_like if same else shapes_on(train, form_like, before)
    _check_same_form(manager, meta["leaves"], target)
    shapes = _shapes(train, target, own=same)
    saved = manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore({k: v for k, v in shapes.items() if v.size}),
            extras=ocp.args.JsonRestore(),
        ),
    )
    arrays = {k: saved["state"][k] if v.size else empty(v) for k, v in shapes.items()}
    state = _rebuilt(arrays, target, meta)
    if not same:
        state = reshard(train, state, before)
        if before.kept is not None:
            _log.warning(
                "checkpoint of other devices: residuals of codecs are redistributed,"
                " and PRNG keys and warm starts of codecs begin anew"
            )
    infos: tuple[StepInfo, ...] = ()
    moved = before.devices != now.devices and train.width > 1
    if moved:
        _log.warning(
            "checkpoint of %d devices restored on %d: gradients in flight are applied"
            " first",
            before.devices,
            now.devices,
        )
        state, infos = train.drain(state)
    return Restored(state, saved["extras"], moved, infos)


def _found(manager: ocp.CheckpointManager, step: int | None) -> int:
    """Returns the step to restore: `step`, or the latest one if `step` is `None`."""
    there = steps(manager)
    if not there:
        raise FileNotFoundError(
            f"`manager` must have a checkpoint, got none in {manager.directory}. Save"
            " one with pipejax.checkpoint.save first."
        )
    if step is not None and step not in there:
        raise FileNotFoundError(
            f"`step` must be the step of a checkpoint in {manager.directory}, which has"
            f" steps {there}; got {step!r}. None restores the latest."
        )
    return max(there) if step is None else operator.index(step)


def _form(like: Any) -> PipelineState:
    """Returns the shapes and dtypes of `like`."""
    if not isinstance(like, PipelineState):
        raise ValueError(
            "`like` must be a pj.PipelineState of the form to restore, got"
            f" {type(like).__name__}. Pass `train.init(params, ...)` or its"
            " `jax.eval_shape`."
        )
    return jax.eval_shape(lambda tree: tree, like)


def _meta(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Returns what `save` has written about the state, beside its arrays."""
    if "meta" not in manager.item_metadata(step):
        raise ValueError(
            f"the checkpoint of step {step} in {manager.directory} must be written by"
            " pipejax.checkpoint.save, and lacks the metadata that it writes. Read the"
            " parameters with the program that wrote them, and save"
            " `train.init(params)` in another folder; or remove the checkpoint."
        )
    found = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
    if "leaves" not in found["meta"]:
        raise ValueError(
            f"the checkpoint of step {step} in {manager.directory} must be of this"
            " version of pipejax, and is of a version before 0.1.0. Continue with that"
            " version, or start a new run from the parameters in the checkpoint."
        )
    return found["meta"]


def _check_width(
    manager: ocp.CheckpointManager, meta: dict[str, Any], train: TrainStep
) -> None:
    if meta["width"] != train.width:
        raise ValueError(
            f"`train` must be of width {meta['width']}, the width of the checkpoint in"
            f" {manager.directory}; got width {train.width}. To change the width,"
            f" restore the checkpoint with a train step of width {meta['width']}, drain"
            " it with `state, _ = train.drain(state)`, and call"
            " `train.init(state.params, model_state=state.model_state, rng=state.rng,"
            " opt_state=state.opt_state, batch=batch)` of the train step of width"
            f" {train.width}."
        )


def _check_same_form(
    manager: ocp.CheckpointManager, saved: dict[str, Any], target: PipelineState
) -> None:
    """Raises an error unless all leaves have the saved names, shapes and dtypes."""
    wanted = {name: form(leaf) for name, leaf in named(target).items()}
    there = {name: (tuple(shape), dtype) for name, (shape, dtype) in saved.items()}
    names = [*wanted, *(name for name in there if name not in wanted)]
    differing = [name for name in names if there.get(name) != wanted.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"`like` must have the form of the checkpoint in {manager.directory}:"
            f" {len(differing)} of {len(names)} leaves differ, the first is {name}:"
            f" saved {_said(there.get(name))}, wanted {_said(wanted.get(name))}."
            " Restore it with the model, optimizer and options that it was saved with."
        )


def _said(form: Form | None) -> str:
    """Returns a leaf's form as JAX writes it, such as `float32[5,7]`."""
    if form is None:
        return "none"
    shape, dtype = form
    return f"{dtype}[{','.join(map(str, shape))}]"


def _shapes(
    train: TrainStep, target: PipelineState, *, own: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape, dtype and sharding of each array to restore, by name.

    Each device has its own part of the arrays in flight and of the states of codecs. If
    `own`, a device receives its own part. Otherwise it receives the parts of all
    devices, for `reshard` to redistribute.
    """
    written = functools.partial(jax.tree.map, encoded)
    shapes = jax.eval_shape(written, target._replace(calls=None))

    def on(mesh: jax.sharding.Mesh, tree: Any, spec: P) -> Any:
        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            # JAX replicates arrays without elements.
            return leaf.update(sharding=NamedSharding(mesh, spec if leaf.size else P()))

        return jax.tree.map(placed, tree)

    spec = P(train.axis_name) if own else P()
    in_flight = on(train.mesh, shapes.in_flight, spec)
    kept = on(train.executor.reduction_mesh, shapes.in_flight.codec_states, spec)
    shapes = on(train.mesh, shapes, P())
    return named(shapes._replace(in_flight=in_flight._replace(codec_states=kept)))


def _rebuilt(
    arrays: dict[str, jax.Array], target: PipelineState, meta: dict[str, Any]
) -> PipelineState:
    """Returns the state of the form `target` whose leaves are encoded in `arrays`."""
    shapes, calls = target._replace(calls=None), meta["calls"]
    leaves = {name: decoded(arrays[name], leaf) for name, leaf in named(shapes).items()}
    leaves |= {name: weakened(leaves[name]) for name in meta["weak"]}
    state = jax.tree.unflatten(jax.tree.structure(shapes), leaves.values())
    return state._replace(calls=None if calls is None else np.int32(calls))

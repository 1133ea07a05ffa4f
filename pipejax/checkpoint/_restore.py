"""Restoring a state, exactly or drained, or refusing one of another form."""

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
    """What `restore` found.

    Attributes:
      state: to go on from.
      extras: what `save` was given beside the state.
      drained: whether gradients in flight had to be applied, because the number of
        devices has changed.
      infos: what applying them reported, as `train.drain` returns it; else empty.
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
    """Restores a state onto the mesh of `train`.

    Waits for a save under way, and sees what other managers have saved in the folder.

    Args:
      manager: what `manager(folder)` returned.
      train: the train step that goes on.
      like: `train.init(...)`, or its `jax.eval_shape`, for its form.
      step: which checkpoint; `None` takes the latest.

    Returns:
      A `Restored`, every leaf with the dtype and the bits that were saved.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if it is of another width, or of another model or optimizer, or was
        not saved by `save`.
    """
    form_like = _form(like)
    train.join()  # Orbax has collectives of its own
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
                "checkpoint of other devices: of what codecs kept, that which is yet to"
                " be sent is handed on, keys and warm starts begin anew"
            )
    infos: tuple[StepInfo, ...] = ()
    moved = before.devices != now.devices and train.width > 1
    if moved:
        _log.warning(
            "checkpoint of %d devices on %d: gradients in flight are applied first",
            before.devices,
            now.devices,
        )
        state, infos = train.drain(state)
    return Restored(state, saved["extras"], moved, infos)


def _found(manager: ocp.CheckpointManager, step: int | None) -> int:
    """Returns the step to restore: the one that was asked for, or the latest."""
    there = steps(manager)
    if not there:
        raise FileNotFoundError(
            f"`manager` must have a checkpoint, got none in {manager.directory}. Save"
            " one with pipejax.checkpoint.save."
        )
    if step is not None and step not in there:
        raise FileNotFoundError(
            f"`step` must be that of a checkpoint in {manager.directory}, which has"
            f" {there}; got {step!r}. None takes the latest."
        )
    return max(there) if step is None else operator.index(step)


def _form(like: Any) -> PipelineState:
    """Returns the shapes and dtypes of `like`."""
    if not isinstance(like, PipelineState):
        raise ValueError(
            "`like` must be a pj.PipelineState of the form to restore, got"
            f" {type(like).__name__}. Pass `train.init(params, ...)`, or its"
            " `jax.eval_shape`."
        )
    return jax.eval_shape(lambda tree: tree, like)


def _meta(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Returns what `save` has noted of the state."""
    if "meta" not in manager.item_metadata(step):
        raise ValueError(
            f"the checkpoint of step {step} in {manager.directory} must be one of"
            " pipejax.checkpoint.save, and has nothing of what that writes. Save"
            " `train.init(params)` of its parameters in another folder, or remove it."
        )
    found = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
    if "leaves" not in found["meta"]:
        raise ValueError(
            f"the checkpoint of step {step} in {manager.directory} must be of this"
            " version of pipejax, and is of one before 0.1.0. Go on with that, or begin"
            " anew from its parameters."
        )
    return found["meta"]


def _check_width(
    manager: ocp.CheckpointManager, meta: dict[str, Any], train: TrainStep
) -> None:
    if meta["width"] != train.width:
        raise ValueError(
            f"`train` must be of width {meta['width']}, as the checkpoint in"
            f" {manager.directory}; got width {train.width}. Restore it with width"
            f" {meta['width']}, `state, _ = train.drain(state)`, and go on from"
            " `train.init(state.params, model_state=state.model_state, rng=state.rng,"
            " opt_state=state.opt_state, batch=batch)` of the other."
        )


def _check_same_form(
    manager: ocp.CheckpointManager, saved: dict[str, Any], target: PipelineState
) -> None:
    """Names, shapes and dtypes of all leaves are those of the checkpoint."""
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
            " Restore it with the model, optimizer and options it was saved with."
        )


def _said(form: Form | None) -> str:
    """Returns a leaf's form as JAX writes it: `float32[5,7]`."""
    if form is None:
        return "none"
    shape, dtype = form
    return f"{dtype}[{','.join(map(str, shape))}]"


def _shapes(
    train: TrainStep, target: PipelineState, *, own: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and place of what is restored, by name.

    What each device has for itself comes to it alone if `own`, and to all otherwise.
    """

    written = functools.partial(jax.tree.map, encoded)
    shapes = jax.eval_shape(written, target._replace(calls=None))

    def on(mesh: jax.sharding.Mesh, tree: Any, spec: P) -> Any:
        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            # JAX replicates what has no elements.
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
    """Returns the state of the form `target` whose leaves were encoded as `arrays`."""
    shapes, calls = target._replace(calls=None), meta["calls"]
    leaves = {name: decoded(arrays[name], leaf) for name, leaf in named(shapes).items()}
    leaves |= {name: weakened(leaves[name]) for name in meta["weak"]}
    state = jax.tree.unflatten(jax.tree.structure(shapes), leaves.values())
    return state._replace(calls=None if calls is None else np.int32(calls))

"""Checkpoints by Orbax: exact on the same devices, drained on others.

- same width, same number of devices: every bit comes back, gradients in flight
  included, and the run ends as if it had never stopped
- another number of devices: what each had for itself is handed on (`reshard`), and what
  is in flight applied (drained) before the run goes on
- another width: refused

Nothing is written half: Orbax writes beside the checkpoint and renames at the end, so a
process killed during a save leaves the one before.
"""

import logging
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .message import width_of
from .reshard import Spread, reshard, shapes_on
from .train_step import PipelineState, StepInfo, TrainStep

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


def manager(folder: pathlib.Path | str, keep: int = 2) -> ocp.CheckpointManager:
    """An Orbax manager of the checkpoints of one run; a context manager.

    Args:
      folder: where they lie; made if it is not there.
      keep: how many of the latest stay.

    Returns:
      An `orbax.checkpoint.CheckpointManager` that saves beside the training.
    """
    return ocp.CheckpointManager(
        pathlib.Path(folder).absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=keep),
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
            "extras": ocp.JsonCheckpointHandler(),
        },
    )


def save(
    manager: ocp.CheckpointManager,
    state: PipelineState,
    extras: dict[str, Any] | None = None,
) -> None:
    """Saves the state under its step, with gradients in flight and PRNG key.

    Returns once the state may be donated; an asynchronous manager writes on beside the
    training. `manager.wait_until_finished()` waits for it.

    Args:
      manager: what `manager(folder)` returned.
      state: what `train.step` returned.
      extras: JSON values to be saved with it, such as the data iterator's state.
    """
    meta = {
        "width": width_of(state.in_flight),
        "spread": Spread.of(state)._asdict(),
    }
    # A copy: on CPU Orbax would otherwise read, after this returns, from memory that a
    # donating step may already be overwriting.
    leaves = {name: jnp.copy(_data(leaf)) for name, leaf in _named(state).items()}
    manager.save(
        int(state.step),
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(leaves),
            meta=ocp.args.JsonSave(meta),
            extras=ocp.args.JsonSave(extras or {}),
        ),
    )


def restore(
    manager: ocp.CheckpointManager,
    train: TrainStep,
    like: PipelineState,
    step: int | None = None,
) -> Restored:
    """Restores a state onto the mesh of `train`.

    Args:
      manager: what `manager(folder)` returned.
      train: the train step that goes on.
      like: `train.init(...)`, or its `jax.eval_shape`, for its form.
      step: which checkpoint; `None` takes the latest.

    Returns:
      A `Restored`.

    Raises:
      FileNotFoundError: if there is no checkpoint.
      ValueError: if it is of another width, or of another model or optimizer, or was
        not saved by `save`.
    """
    step = manager.latest_step() if step is None else step
    if step is None:
        raise FileNotFoundError(
            f"`manager` must have a checkpoint, got none in {manager.directory}. Save"
            " one with pipejax.checkpoint.save."
        )
    if "meta" not in manager.item_metadata(step):
        raise ValueError(
            f"the checkpoint in {manager.directory} must be one of"
            " pipejax.checkpoint.save, and has nothing of what that writes. Save"
            " `train.init(params)` of its parameters."
        )
    found = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
    meta = found["meta"]
    if meta["width"] != train.width:
        raise ValueError(
            f"`train` must be of width {meta['width']}, as the checkpoint in"
            f" {manager.directory}; got width {train.width}. Restore it with width"
            f" {meta['width']}, `train.drain(state)`, and go on from `train.init("
            "state.params, opt_state=state.opt_state)` of the other."
        )
    if "spread" not in meta:
        raise ValueError(
            f"the checkpoint in {manager.directory} must be of this version of pipejax,"
            " and is of one before 0.1.0. Go on with that, or begin anew from its"
            " parameters."
        )
    before, now = Spread(**meta["spread"]), Spread.now(train, like)
    same = before.same_as(now, train)
    form = like if same else shapes_on(train, like, before)
    target = _target(train, form, own=same)
    _check_same_form(manager, _saved_shapes(manager, step), target)
    saved = manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(target), extras=ocp.args.JsonRestore()
        ),
    )
    state = _rebuilt(saved["state"], form)
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


Shapes = dict[str, tuple[tuple[int, ...], str]]


def _saved_shapes(manager: ocp.CheckpointManager, step: int) -> Shapes:
    return {
        name: (tuple(leaf.shape), jnp.dtype(leaf.dtype).name)
        for name, leaf in manager.item_metadata(step)["state"].items()
    }


def _target(
    train: TrainStep, form: PipelineState, *, own: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and place of every leaf: what is a device's own on it, or all on each."""
    target = {}
    shapes = jax.eval_shape(lambda tree: jax.tree.map(_data, tree), form)
    for name, leaf in _named(shapes).items():
        mesh, spec = train.mesh, P()
        if name.startswith("in_flight.codec_states."):
            mesh = train.executor.reduction_mesh
        if name.startswith("in_flight.") and own:
            spec = P(train.axis_name)
        target[name] = jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )
    return target


def _check_same_form(
    manager: ocp.CheckpointManager, saved: Shapes, target: dict[str, Any]
) -> None:
    wanted = {k: (v.shape, jnp.dtype(v.dtype).name) for k, v in target.items()}
    names = sorted(saved.keys() | wanted.keys())
    differing = [name for name in names if saved.get(name) != wanted.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"`like` must have the form of the checkpoint in {manager.directory}:"
            f" {len(differing)} of {len(names)} leaves differ, the first is {name}:"
            f" saved {saved.get(name)}, wanted {wanted.get(name)}. Restore it with the"
            " model, optimizer and options it was saved with."
        )


def _rebuilt(saved: dict[str, jax.Array], like: PipelineState) -> PipelineState:
    """The named leaves, in the structure of `like`, keys as keys again."""
    leaves = [
        jax.random.wrap_key_data(saved[name], impl=_impl(leaf))
        if _is_key(leaf)
        else saved[name]
        for name, leaf in _named(like).items()
    ]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    if state.calls is None:
        return state
    return state._replace(calls=np.int32(state.calls))


def _named(state: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    """A typed PRNG key as the integers it is, which is what can be written."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _impl(leaf: Any) -> Any:
    """The PRNG implementation of a key, or of the shape of one."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]

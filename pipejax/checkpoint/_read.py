"""Reads the checkpoint of one step, and checks every part of it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.checksums import checksums
from pipejax.mesh import axes, inner_axes
from pipejax.reshard import Spread, shapes_on
from pipejax.train_step import (
    PipelineState,
    SharedState,
    TrainStep,
    in_flight_shardings,
    state_shardings,
)

from ._fault import Fault, agreed, attempt
from ._leaves import Form, empty, encoded, form, named
from ._meta import check_version, damage, read


class Saved(NamedTuple):
    """The contents of a whole checkpoint.

    Attributes:
      arrays: The arrays by name, as they were written.
      form: The shapes and dtypes of the state that was saved.
      extras: The extras that `save` was given.
      meta: What `save` has written about the state.
      spread: How the state was spread over devices.
      same_spread: Whether the train step spreads its states in the same way.
      same_copies: Whether it also spreads coarse copies in the same way.
    """

    arrays: dict[str, jax.Array]
    form: PipelineState
    extras: dict[str, Any]
    meta: dict[str, Any]
    spread: Spread
    same_spread: bool
    same_copies: bool


def read_step(
    manager: ocp.CheckpointManager, train: TrainStep, like: PipelineState, step: int
) -> Saved | Fault:
    """Reads a checkpoint; returns its contents, or a fault on all processes.

    Args:
      manager: The manager of the folder.
      train: The train step that continues the run.
      like: The shapes and dtypes of its states.
      step: The step, whose folder must exist.

    Raises:
      ValueError: If the checkpoint is of another version, width or form.
    """
    path = manager.directory / str(step)
    found = attempt(lambda: read(path))
    if isinstance(found, Fault):
        return found
    meta, extras = found
    check_version(path, meta)
    if fault := agreed(_fault(damage(meta, extras, step))):
        return fault
    _check_width(manager, meta, train)
    before, now = Spread(**meta["spread"]), Spread.now(train, like)
    same = before.same_as(now, train)
    target = like if same else shapes_on(train, like, before)
    target = _with_saved_copies(target, meta["leaves"])
    if not train.counted:  # `init` may have set the counter for the first step alone
        target = target._replace(calls=_saved_counter(meta["leaves"]))
    same_copies = same and target.coarse == like.coarse
    _check_same_form(manager, meta["leaves"], target)
    shapes = _shapes(train, target, own=same, own_copies=same_copies)
    written = {name: shape for name, shape in shapes.items() if shape.size}
    arrays = attempt(lambda: _arrays(path, written))
    if isinstance(arrays, Fault):
        return arrays
    if fault := agreed(_fault(_wrong(checksums(arrays), meta["checksums"]))):
        return fault
    every = {k: arrays[k] if v.size else empty(v) for k, v in shapes.items()}
    return Saved(every, target, extras, meta, before, same, same_copies)


def _with_saved_copies(target: PipelineState, saved: dict[str, Any]) -> PipelineState:
    """Returns a form in which coarse copies have the shape that was saved.

    The shape depends on the devices. On others, the copies are made anew.
    """
    if target.coarse is None or "coarse.codes" not in saved:
        return target
    shape, dtype = saved["coarse.codes"]
    codes = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return target._replace(coarse=target.coarse._replace(codes=codes))


def _saved_counter(saved: dict[str, Any]) -> jax.ShapeDtypeStruct | None:
    """Returns the form of the counter of calls that was saved, or `None`."""
    return jax.ShapeDtypeStruct((), jnp.int32) if "calls" in saved else None


def _arrays(path: Any, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads the arrays without the barriers of a manager.

    At such a barrier, other processes would wait for one that fails.
    """
    args = ocp.args.StandardRestore(shapes)
    arrays = ocp.StandardCheckpointHandler().restore(path / "state", args=args)
    return jax.block_until_ready(arrays)


def _fault(damage: str | None) -> Fault | None:
    return Fault(True, damage) if damage else None


def _wrong(found: dict[str, str], saved: dict[str, str]) -> str | None:
    """Returns which arrays have another checksum than was saved, or `None`."""
    names = [name for name in found if found[name] != saved.get(name)]
    if not names:
        return None
    return (
        f"{len(names)} of {len(found)} leaves are not what was saved, the first is"
        f" {names[0]}"
    )


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
    train: TrainStep, target: PipelineState, *, own: bool, own_copies: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape, dtype and sharding of each array to restore, by name.

    Each device or group has its own part of the arrays in flight and of the states of
    codecs. If `own`, it receives its own part. Otherwise it receives the parts of all,
    for `reshard` to redistribute. Unless `own_copies`, every device receives all coarse
    copies.
    """
    written = functools.partial(jax.tree.map, encoded)
    target = target._replace(calls=None)
    shapes, shards = jax.eval_shape(written, target), target.shards
    data = axes(train.axis_name) if own else ()
    in_flight = in_flight_shardings(target.in_flight, shards, train.config, data)
    kept_on = train.executor.reduction_mesh
    inner = inner_axes(kept_on, train.axis_name) if shards else ()
    kept = NamedSharding(kept_on, P((*data, *inner) or None))
    states = jax.tree.map(lambda _: kept, target.in_flight.codec_states)
    shared = SharedState.of(target)
    shardings = state_shardings(shared, train.mesh, train.axis_name).with_in_flight(
        in_flight._replace(codec_states=states), None
    )
    if not own_copies:
        whole = NamedSharding(train.mesh, P())
        coarse = jax.tree.map(lambda _: whole, target.coarse)
        shardings = shardings._replace(coarse=coarse)

    def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Any:
        # JAX replicates arrays without elements.
        whole = NamedSharding(sharding.mesh, P())
        return leaf.update(sharding=sharding if leaf.size else whole)

    return named(jax.tree.map(placed, shapes, shardings))

"""Reads the checkpoint of one step, and checks every part of it."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import codec_states, in_flight_shardings, state_shardings
from pipejax._core.step import common_of, state_of
from pipejax._internal.checksums import checksums
from pipejax._internal.mesh import axes
from pipejax.train_step import (
    PipelineState,
    TrainStep,
)

from ._check_like import check_optimizer_of
from ._check_saved import check_form, check_passengers, check_train, differing
from ._fault import DamagedError, Fault, attempt
from ._leaves import empty, encoded, named, part_of
from ._meta import check_version, check_whole, read
from ._reshard import shapes_on
from ._spread import Spread

# Parts of a state that are sometimes not read, but made anew.
QUEUE, CODECS = "in_flight.pending", "in_flight.codec_states"
MEAN, SLOPES = "mean", "slopes"
_GRADIENT = re.compile(r"(in_flight\.pending\[\d+\]\.gradients|mean\.g)")


class Saved(NamedTuple):
    """The contents of a whole checkpoint."""

    arrays: dict[str, jax.Array]
    form: PipelineState  # the shapes and dtypes of the arrays
    extras: dict[str, Any]
    meta: dict[str, Any]  # what `save` has written about the state
    devices: int  # or groups, that shared the data
    anew: tuple[str, ...]  # the parts of a state that must be made anew


def read_step(
    manager: ocp.CheckpointManager, train: TrainStep, like: PipelineState, step: int
) -> Saved | Fault:
    """Reads a checkpoint; returns its contents, or a fault on all processes.

    Raises a `ValueError` if the checkpoint is of another version, width or form.
    """
    path = manager.directory / str(step)
    found = attempt(lambda: read(path))
    if isinstance(found, Fault):
        return found
    meta, extras = found
    check_version(path, meta)
    if fault := attempt(lambda: check_whole(meta, extras, step)):
        return fault
    check_train(path, meta, train, like)
    check_passengers(path, meta, like)
    before, now = Spread(**meta["spread"]), Spread.now(train, like)
    leaves = _needed(meta["leaves"], like)
    anew = _anew(meta | {"leaves": leaves}, before, now, train, like)
    if len(leaves) < len(meta["leaves"]):  # codecs have states for other gradients
        anew = (*anew, CODECS)
    target = _without(anew, like)
    if not train.boundaries:  # the train step that saved it may count its calls
        counter = jax.ShapeDtypeStruct((), jnp.int32)
        target = target._replace(calls=counter if "calls" in meta["leaves"] else None)
    if before.devices != now.devices:
        target = shapes_on(train, target, before.devices)
    saved = {k: v for k, v in leaves.items() if not part_of(k, anew)}
    check_form(path, saved, target)
    check_optimizer_of(train, like)
    shapes = _shapes(train, target, own=before.devices == now.devices)
    written = {name: shape for name, shape in shapes.items() if shape.size}
    arrays = attempt(lambda: _arrays(path, written))
    if isinstance(arrays, Fault):
        return arrays
    found_sums = checksums(arrays)
    if fault := attempt(lambda: _check_sums(found_sums, meta["checksums"])):
        return fault
    every = {k: arrays[k] if v.size else empty(v) for k, v in shapes.items()}
    return Saved(every, target, extras, meta, before.devices, anew)


def _needed(leaves: dict[str, Any], like: PipelineState) -> dict[str, Any]:
    """Returns the saved leaves without gradients that the train step does not need.

    They are those of frozen parameters, which an earlier version kept in flight, too.
    """
    wanted = named(like)
    return {k: v for k, v in leaves.items() if k in wanted or not _GRADIENT.match(k)}


def _anew(
    meta: dict[str, Any],
    before: Spread,
    now: Spread,
    train: TrainStep,
    like: PipelineState,
) -> tuple[str, ...]:
    # A single device predicts without a mean. Where nothing is in flight, the dtype of
    # messages may be another, and with it that of the mean.
    other = before.devices != now.devices or meta["in_flight"] == 0
    same_mean = not other or not any(
        part_of(name, (MEAN, SLOPES)) for name in differing(meta["leaves"], like)
    )
    read = {
        QUEUE: meta["in_flight"] != 0,
        CODECS: before.same_codecs(now, train),
        MEAN: same_mean,
        SLOPES: same_mean,
    }
    return tuple(part for part, is_read in read.items() if not is_read)


def _without(anew: tuple[str, ...], like: PipelineState) -> PipelineState:
    in_flight = like.in_flight
    if QUEUE in anew:
        in_flight = in_flight._replace(pending=())
    if CODECS in anew:
        in_flight = in_flight._replace(codec_states={})
    if MEAN in anew:
        like = like._replace(trainable=like.trainable._replace(mean=None, slopes=None))
    return like._replace(in_flight=in_flight)


def _arrays(path: Any, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    args = ocp.args.PyTreeRestore(
        item=shapes,
        restore_args=ocp.checkpoint_utils.construct_restore_args(shapes),
        partial_restore=True,
    )
    # At a barrier of a manager, other processes would wait for one that fails.
    arrays = ocp.PyTreeCheckpointHandler().restore(path / "state", args=args)
    if missing := [name for name in shapes if name not in arrays]:
        raise DamagedError(f"{missing[0]} is missing")
    return jax.block_until_ready(arrays)


def _check_sums(found: dict[str, str], saved: dict[str, str]) -> None:
    names = [name for name in found if found[name] != saved.get(name)]
    if names:
        raise DamagedError(
            f"{len(names)} of {len(found)} leaves are not what was saved, the first is"
            f" {names[0]}"
        )


def _shapes(
    train: TrainStep, target: PipelineState, *, own: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape, dtype and sharding of each array to restore, by name."""
    written = functools.partial(jax.tree.map, encoded)
    target = target._replace(calls=None)
    shapes = jax.eval_shape(written, target)
    data = axes(train.axis_name) if own else ()
    # Without axes, every device receives the parts of all, for `reshard` to share out.
    in_flight = in_flight_shardings(target.in_flight, train.config, data)
    if states := target.in_flight.codec_states:
        placed_states = codec_states(
            train.phases, train.executor.reduction_mesh, target, abstract=True
        )
        states = jax.tree.map(lambda x: x.sharding, placed_states)
    in_flight = in_flight._replace(codec_states=states)
    common = state_shardings(common_of(target), train.mesh, train.axis_name)
    shardings = state_of(common, in_flight, None)

    def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Any:
        # JAX replicates arrays without elements.
        whole = NamedSharding(sharding.mesh, P())
        return leaf.update(sharding=sharding if leaf.size else whole)

    return named(jax.tree.map(placed, shapes, shardings))

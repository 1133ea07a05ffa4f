"""Says which part of a checkpoint a train step of a pipeline reads."""

from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from pipejax._core.executors import codec_states, in_flight_shardings, state_shardings
from pipejax._core.step import common_of, state_of
from pipejax.train_step import PipelineState, TrainStep

from ._check_like import check_optimizer_of
from ._check_saved import (
    check_form,
    check_kind,
    check_optimizers,
    check_passengers,
    check_train,
    differing,
)
from ._leaves import CODECS, COUNTERS, GATHERED, MEAN, QUEUE, SLOPES, part_of
from ._read import Wanted
from ._reshard import shapes_on
from ._spread import Spread


def wanted_of_pipeline(
    train: TrainStep, like: PipelineState, path: epath.Path, meta: dict[str, Any]
) -> Wanted:
    """Returns the part of a checkpoint that `train` continues from.

    Raises a `ValueError` if the checkpoint is of another width, optimizer or loss.
    """
    check_kind(path, meta, rounds=False)
    check_train(path, meta, train, like)
    check_passengers(path, meta, like)
    before, now = Spread(**meta["spread"]), Spread.now(train, like)
    leaves = meta["leaves"]
    anew = _anew(meta, before, now, train, like)
    target = _without(anew, like)
    if not train.boundaries:  # the train step that saved it may count its calls
        counter = jax.ShapeDtypeStruct((), jnp.int32)
        target = target._replace(calls=counter if "calls" in leaves else None)
    target = shapes_on(train, target, before)
    saved = {k: v for k, v in leaves.items() if not part_of(k, anew)}
    check_form(path, saved, target)
    check_optimizers(path, meta, like)
    check_optimizer_of(train, like)
    # For `reshard` to share out, every device receives the messages of all.
    form = _placed(train, target, whole=before.moves_to(train.config))
    numbers = {} if meta["calls"] is None else {"calls": meta["calls"]}
    return Wanted(form, numbers, before, anew)


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
    others = differing(meta["leaves"], like)
    same_mean = not other or not any(part_of(x, (MEAN, SLOPES)) for x in others)
    # Where nothing is in flight, all parameters have had the same number of updates.
    same_counters = meta["in_flight"] != 0 or not any(
        part_of(x, (COUNTERS,)) for x in others
    )
    read = {
        QUEUE: meta["in_flight"] != 0,
        CODECS: before.same_codecs(now, *(x.all_reduce for x in train.phases)),
        MEAN: same_mean,
        SLOPES: same_mean,
        GATHERED: before.devices == now.devices,
        COUNTERS: same_counters,
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
    if GATHERED in anew:
        like = like._replace(trainable=like.trainable._replace(gathered=None))
    if COUNTERS in anew:
        like = like._replace(trainable=like.trainable._replace(delayed_counters=None))
    return like._replace(in_flight=in_flight)


def _placed(train: TrainStep, target: PipelineState, *, whole: bool) -> PipelineState:
    """Returns shape, dtype and sharding of each array to restore."""
    in_flight = in_flight_shardings(target.in_flight, train.config, whole=whole)
    if states := target.in_flight.codec_states:
        placed_states = codec_states(
            train.phases, train.executor.reduction_mesh, target, abstract=True
        )
        states = jax.tree.map(lambda x: x.sharding, placed_states)
    in_flight = in_flight._replace(codec_states=states)
    common = state_shardings(common_of(target), train.mesh, train.axis_name)
    shardings = state_of(common, in_flight, None)
    placed = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        target._replace(calls=None),
        shardings,
    )
    return placed._replace(calls=target.calls)

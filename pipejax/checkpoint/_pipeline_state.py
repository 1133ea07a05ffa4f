"""Continues a pipeline from the contents of a checkpoint."""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from pipejax._core.executors import codec_states, in_flight_shardings, state_shardings
from pipejax._core.step import common_of
from pipejax._internal.mesh import axes
from pipejax.train_step import PipelineState, StepInfo, TrainStep

from ._leaves import part_of
from ._pipeline_form import CODECS, MEAN, QUEUE
from ._read import Saved, rebuilt
from ._reshard import reshard

_log = logging.getLogger(__name__)


def pipeline_state(
    train: TrainStep, wanted: PipelineState, saved: Saved
) -> tuple[PipelineState, bool, tuple[StepInfo, ...]]:
    """Returns the state, whether it was drained, and what the drain has reported.

    `wanted` has the shapes of the state.
    """
    before, now, anew = saved.wanted.devices, train.config.devices, saved.wanted.anew
    state = rebuilt(saved)
    if MEAN in anew:
        state = _with_new_mean(train, state, wanted)
    if before != now:
        state = reshard(train, state, before)
    if QUEUE in anew:
        state = _with_empty_queue(train, state, wanted)
    if CODECS in anew:
        state = _with_new_codec_states(train, state, saved)
    if before == now or train.width == 1:
        return state, False, ()
    _log.warning(
        "checkpoint of %d devices restored on %d: gradients in flight are applied"
        " first",
        before,
        now,
    )
    state, infos = train.drain(state)
    return state, True, infos


def _with_empty_queue(
    train: TrainStep, state: PipelineState, wanted: PipelineState
) -> PipelineState:
    form = wanted.in_flight._replace(codec_states={})
    data = axes(train.axis_name)
    shardings = in_flight_shardings(form, train.config, data)
    pending = zeros(form.pending, shardings.pending)
    return state._replace(in_flight=state.in_flight._replace(pending=pending))


def _with_new_mean(
    train: TrainStep, state: PipelineState, wanted: PipelineState
) -> PipelineState:
    common = state_shardings(common_of(wanted), train.mesh, train.axis_name)
    mean = zeros(wanted.mean, common.trainable.mean)
    if mean is not None:
        # With a sharded optimizer, an unknown mean says that its state is new.
        mean = mean._replace(known=mean.known | bool(state.shards.data_axes))
    slopes = zeros(wanted.slopes, common.trainable.slopes)
    trained = state.trainable._replace(mean=mean, slopes=slopes)
    return state._replace(trainable=trained)


def zeros(form: Any, shardings: Any = None) -> Any:
    """Returns arrays of zeros, in the shardings of `form` if none are given."""
    if shardings is None:
        shardings = jax.tree.map(lambda x: x.sharding, form)

    def made() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form)

    return jax.jit(made, out_shardings=shardings)()


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

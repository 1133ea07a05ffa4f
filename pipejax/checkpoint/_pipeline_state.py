"""Continues a pipeline from the contents of a checkpoint."""

import logging

import jax
import jax.numpy as jnp
import optax

from pipejax._core.executors import codec_states, in_flight_shardings, state_shardings
from pipejax._core.step import common_of
from pipejax.train_step import PipelineState, StepInfo, TrainStep

from ._leaves import CODECS, COUNTERS, GATHERED, MEAN, QUEUE, zeros
from ._read import Saved, rebuilt, warn_of_lost
from ._reshard import reshard

_log = logging.getLogger(__name__)


def pipeline_state(
    train: TrainStep, wanted: PipelineState, saved: Saved
) -> tuple[PipelineState, bool, tuple[StepInfo, ...]]:
    """Returns the state, whether it was drained, and what the drain has reported.

    `wanted` has the shapes of the state.
    """
    state, before, anew = rebuilt(saved), saved.wanted.before, saved.wanted.anew
    config = train.config
    if MEAN in anew:
        state = _with_new_mean(train, state, wanted)
    if GATHERED in anew:
        state = _with_new_gathered(train, state, wanted)
    if COUNTERS in anew:
        state = _with_new_counters(state, wanted)
    if before.moves_to(config):
        state = reshard(train, state, before)
    if QUEUE in anew:
        state = _with_empty_queue(train, state, wanted)
    if CODECS in anew:
        state = _with_new_codec_states(train, state, saved)
    state = train.known_pairs.remember(state)
    if not saved.meta["in_flight"]:
        return state, False, ()
    if before.devices != config.devices:
        _log.warning(
            "checkpoint of %d devices restored on %d: gradients in flight are applied"
            " first",
            before.devices,
            config.devices,
        )
    elif _is_synchronous(train, saved.meta["calls"]):
        _log.warning(
            "checkpoint restored inside a warm-up: gradients in flight are applied"
            " first, since the next step has no delay"
        )
    else:
        return state, False, ()
    state, infos = train.drain(state)
    return state, True, infos


def _is_synchronous(train: TrainStep, calls: int | None) -> bool:
    """Returns whether the step after these calls is one of a warm-up."""
    return train.phases[train.phase_after(calls or 0)].width == 1


def _with_empty_queue(
    train: TrainStep, state: PipelineState, wanted: PipelineState
) -> PipelineState:
    form = wanted.in_flight._replace(codec_states={})
    shardings = in_flight_shardings(form, train.config)
    pending = zeros(form.pending, shardings.pending)
    return state._replace(in_flight=state.in_flight._replace(pending=pending))


def _with_new_mean(
    train: TrainStep, state: PipelineState, wanted: PipelineState
) -> PipelineState:
    common = state_shardings(common_of(wanted), train.mesh, train.axis_name)
    trained = state.trainable._replace(
        mean=zeros(wanted.mean, common.trainable.mean),
        slopes=zeros(wanted.slopes, common.trainable.slopes),
    )
    return state._replace(trainable=trained)


def _with_new_gathered(
    train: TrainStep, state: PipelineState, wanted: PipelineState
) -> PipelineState:
    form = wanted.trainable.gathered
    if form is None:
        return state
    common = state_shardings(common_of(wanted), train.mesh, train.axis_name)

    def gather(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda x, like: x.astype(like.dtype), params, form)

    gather = jax.jit(gather, out_shardings=common.trainable.gathered)
    trained = state.trainable._replace(gathered=gather(state.params))
    return state._replace(trainable=trained)


def _with_new_counters(state: PipelineState, wanted: PipelineState) -> PipelineState:
    form = wanted.trainable.delayed_counters
    if form is None:
        return state
    counters = jax.tree.map(
        lambda leaf, counter: None if counter is None else jnp.copy(leaf),
        state.opt_state,
        form,
    )
    trained = state.trainable._replace(delayed_counters=counters)
    return state._replace(trainable=trained)


def _with_new_codec_states(
    train: TrainStep, state: PipelineState, saved: Saved
) -> PipelineState:
    warn_of_lost(saved, CODECS)
    states = codec_states(train.phases, train.executor.reduction_mesh, state)
    return state._replace(in_flight=state.in_flight._replace(codec_states=states))

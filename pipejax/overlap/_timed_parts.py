"""The three things that `measure` times: compute, an exchange, and the whole step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pipejax._core.executors import (
    Rounds,
    StepKind,
    check_rounds,
    make_exchange,
    parted,
)
from pipejax._core.message import Message, parted_states, valid_at_once, valid_in_step
from pipejax._core.rounds import Position
from pipejax._core.step import parted as delayed_and_not
from pipejax._internal.round_schedule import RoundSchedule
from pipejax._internal.types import Tree
from pipejax.collectives import NoCommunication
from pipejax.train_step import LocalState, LocalTrainStep, PipelineState, TrainStep


class TimedParts(NamedTuple):
    """The parts of a step, none of which changes its arguments.

    Attributes:
      alone: A step that communicates nothing.
      whole: The step with its exchange.
      exchange: Function that runs the exchange of a step, with nothing beside it.
      silent: A drained state, with which the step that communicates nothing begins.
      state: The same state for the whole step.
      fills: The number of steps that fill the pipeline.
    """

    alone: TrainStep | LocalTrainStep
    whole: TrainStep | LocalTrainStep
    exchange: Callable[[], Any]
    silent: PipelineState | LocalState
    state: PipelineState | LocalState
    fills: int


def parts_of(
    train: TrainStep, state: PipelineState, batch: Tree, shared: Tree
) -> TimedParts:
    """Returns the parts of a pipelined step, whose exchange sends zeros."""
    whole = _with(train)
    state, _ = jax.block_until_ready(whole.drain(state))
    alone = _with(train, all_reduce=NoCommunication())
    like = _all_delayed(alone).init(
        state.params,
        model_state=state.model_state,
        rng=state.rng,
        batch=batch,
        shared=shared,
    )
    (message,) = like.in_flight.pending
    # Without communication, codecs have no states.
    silent = state.in_flight._replace(codec_states=like.in_flight.codec_states)
    return TimedParts(
        alone=alone,
        whole=whole,
        exchange=_exchange_of(whole, state, message),
        silent=state._replace(in_flight=silent),
        state=state,
        fills=whole.width - 1,
    )


def _all_delayed(train: TrainStep) -> TrainStep:
    """Returns `train` at width 2, with all of its gradients in one message."""
    step = train.config.step
    within = step.settings.axis_within_host(train.config.width)
    settings = dataclasses.replace(
        step.settings, delayed=None, at_once=None, device_axis=within
    )
    return _with(train, width=2, step=step._replace(settings=settings))


def _exchange_of(
    train: TrainStep, state: PipelineState, message: Message
) -> Callable[[], Any]:
    """Returns a function that exchanges what a step does, delayed or at once."""
    config, mesh = train.config, train.executor.reduction_mesh
    # The exchange of a sharded optimizer updates each device's pieces in between.
    trained = state.trainable if config.step.shards_optimizer else None
    divide = functools.partial(delayed_and_not, config.step.settings, state.params)
    own: Any = config.message_spec
    late, early = jax.jit(config.on_mesh(divide, own, own))(message)
    late_states, early_states = parted_states(state.in_flight.codec_states)
    valid = valid_in_step(train.width - 1, train.width - 1)
    exchange = make_exchange(config, mesh)
    of_late = functools.partial(exchange, trained, late, late_states, valid)
    if early is None:
        return of_late
    at_once = make_exchange(config.at_once, mesh)
    return lambda: (of_late(), at_once(None, early, early_states, valid_at_once()))


def parts_of_rounds(train: LocalTrainStep, state: LocalState, steps: int) -> TimedParts:
    """Returns the parts of a local step with a chunk, of which `steps` are timed.

    If nothing hides the exchange, the whole step is the last one of a round.
    """
    check_rounds(train.rounds.config, state)
    form = state.shared.form
    overlap = train.rounds.config.schedule_of(form).overlap_steps
    whole = _scheduled(train, RoundSchedule(form.chunks, overlap))
    state, _ = jax.block_until_ready(whole.drain(state))
    # A round that is under way has something to report.
    state = state._replace(position=Position.at(0, 1))
    kind = StepKind.of(0, form.chunks)
    args = parted(state, kind, 0)
    return TimedParts(
        # The first chunk of such a round comes after the steps that are timed.
        alone=_scheduled(train, RoundSchedule(form.chunks * (steps + 1), overlap)),
        whole=whole,
        exchange=functools.partial(whole.executor.exchange, kind, *args),
        silent=state,
        state=state,
        fills=0,
    )


def _with(train: TrainStep, **changes: Any) -> TrainStep:
    """Returns `train` without warm-up and in its last phase, with these changes."""
    config = dataclasses.replace(train.config, **{"donate": False} | changes)
    return dataclasses.replace(train, config=config, earlier=(), boundaries=())


def _scheduled(train: LocalTrainStep, schedule: RoundSchedule) -> LocalTrainStep:
    """Returns `train` with other rounds, in which no step overwrites its state."""
    config = train.rounds.config
    inner = dataclasses.replace(config.inner, donate=False)
    config = dataclasses.replace(config, inner=inner, schedule=schedule)
    return dataclasses.replace(train, rounds=Rounds(config, train.rounds.asked))

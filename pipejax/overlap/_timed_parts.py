"""The three things that `measure` times: compute, an exchange, and the whole step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pipejax._core.executors import Rounds, StepKind, make_exchange, parted
from pipejax._core.message import valid_in_step
from pipejax._core.rounds import Position
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
      state: A drained state, with which both steps begin.
      fills: The number of steps that fill the pipeline.
    """

    alone: TrainStep | LocalTrainStep
    whole: TrainStep | LocalTrainStep
    exchange: Callable[[], Any]
    state: PipelineState | LocalState
    fills: int


def parts_of(
    train: TrainStep, state: PipelineState, batch: Tree, shared: Tree
) -> TimedParts:
    """Returns the parts of a pipelined step, whose exchange sends zeros."""
    whole = _with(train)
    state, _ = jax.block_until_ready(whole.drain(state))
    like = _with(train, width=2).init(
        state.params,
        model_state=state.model_state,
        rng=state.rng,
        batch=batch,
        shared=shared,
    )
    (message,) = like.in_flight.pending
    exchange = make_exchange(whole.config, whole.executor.reduction_mesh)
    # The exchange of a sharded optimizer updates each device's pieces in between.
    trained = state.trainable if whole.config.step.shards_optimizer else None
    valid = valid_in_step(whole.width - 1, whole.width - 1)
    return TimedParts(
        alone=_with(train, all_reduce=NoCommunication()),
        whole=whole,
        exchange=functools.partial(
            exchange, trained, message, state.in_flight.codec_states, valid
        ),
        state=state,
        fills=whole.width - 1,
    )


def parts_of_rounds(train: LocalTrainStep, state: LocalState, steps: int) -> TimedParts:
    """Returns the parts of a local step with a chunk, of which `steps` are timed.

    If nothing hides the exchange, the whole step is the last one of a round.
    """
    train.rounds.check(state)
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

"""Lists what a step sends: its exchange, and collectives of loss and optimizer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import (
    Moves,
    Outcome,
    RoundConfig,
    RoundReads,
    StepConfig,
    StepKind,
    parted,
)
from pipejax._core.message import (
    Exchange,
    InFlight,
    Message,
    Reduced,
    agreed_bytes,
    valid_at_once,
    valid_in_step,
)
from pipejax._core.rounds import LocalState
from pipejax._core.step import (
    Common,
    Inputs,
    PipelineState,
    common_of,
    inputs_over,
    state_data_specs,
)
from pipejax._internal.hlo import Reading, parse
from pipejax._internal.integers import is_integer
from pipejax._internal.mesh import inner_axes, size_along
from pipejax._internal.shards import group_axes
from pipejax._internal.traced_axes import collective_axes
from pipejax.collectives import Transfer


def transfers_of(
    config: StepConfig, state: PipelineState, inputs: Inputs
) -> tuple[Transfer, ...]:
    """Lists every collective of a step, from shapes alone.

    The stages of the exchange list what they move. The collectives of the loss and the
    optimizer are read from a program that runs both without the exchange. The program
    is compiled only if it has a collective.
    """

    def local(state: Common, in_flight: InFlight, inputs: Inputs) -> Any:
        message, computed = step.compute(state, in_flight, inputs)
        valid = valid_in_step(in_flight.filled[0], config.width - 1)
        mark = config.mark(inputs.batch)
        exchange = config.exchange(state.trainable, message, valid, mark)
        if step.shards_optimizer:  # the exchange checks the sum and updates
            total = message._replace(gradients=None)
            squares = jnp.zeros(0)
            reduced = Reduced(total, valid.message, valid.message, squares)
        else:
            reduced = Reduced.of(message, valid.message)
        flags = _flags(exchange, message, config)
        transfers, at_once = (*flags, *exchange.stages.transfers), None
        if computed.at_once is not None:
            now, by = valid_at_once(), config.at_once.sums_by
            first = step.exchange(None, computed.at_once, now, by)
            others = _flags(first, computed.at_once, config.at_once)
            transfers = (*others, *first.stages.transfers, *transfers)
            at_once = Reduced.of(computed.at_once, now.message)
        # A `Partial` without arguments has no arrays, and keeps its function.
        listed = jax.tree_util.Partial(lambda: transfers)
        return message, step.apply(state, computed, reduced, at_once), listed

    step, own = config.step, common_of(state)
    axis, queue = config.axis_name, config.queue_specs
    specs = state_data_specs(own, axis), queue, inputs_over(axis)
    found = config.message_spec, P(), P()
    without_exchange = jax.jit(config.on_mesh(local, specs, found))
    args = own, state.in_flight._replace(codec_states={}), inputs
    sharded = bool(inner_axes(config.mesh, config.axis_name))
    others = _own_transfers(without_exchange, *args, sharded=sharded)
    *_, listed = jax.eval_shape(without_exchange, *args)
    return (*others, *listed())


def _flags(
    exchange: Exchange, message: Message, config: StepConfig
) -> tuple[Transfer, ...]:
    """Returns what devices send to agree on states of codecs, and on the weight."""
    weighted = message.weight is not None
    divides = weighted and config.all_reduce.narrow
    # A state also has those of algorithms that a schedule has left behind.
    if not (divides or jax.tree.leaves(exchange.stages.init())):
        return ()
    size = agreed_bytes(config.devices, weighted=weighted)
    between = Transfer("all-reduce", config.devices, size)
    if not message.shards:
        return (between,)
    mesh, inner = group_axes()
    within = Transfer("all-reduce", size_along(mesh, inner), 4)
    return within, between


def transfers_of_round(
    config: RoundConfig, state: LocalState, inputs: Inputs, chunk: int | None
) -> tuple[Transfer, ...]:
    """Lists every collective of the steps of a round, or of the step with a chunk.

    The last chunk has a report, as in all rounds but the first, if that has one step.
    """
    schedule = config.schedule_of(state.shared.form)
    last = schedule.chunks - 1
    if chunk is not None and not (is_integer(chunk, 0) and chunk <= last):
        raise ValueError(
            f"`chunk` must be an integer from 0 to {last}, the number of one of the"
            f" chunks of a round, or None for all steps of a round; got {chunk!r}."
        )
    numbers = [schedule.chunk_at(taken) for taken in range(schedule.sync_every)]
    if not schedule.overlap_steps:  # the exchange follows the last step
        numbers[-1] = last

    @functools.cache
    def of(kind: StepKind) -> tuple[Transfer, ...]:
        return _of_local_step(config, state, inputs, kind)

    return tuple(
        transfer
        for number in (numbers if chunk is None else [chunk])
        for transfer in of(StepKind.of(number, schedule.chunks))
    )


def _of_local_step(
    config: RoundConfig, state: LocalState, inputs: Inputs, kind: StepKind
) -> tuple[Transfer, ...]:
    """Lists every collective of a kind of local step, as `transfers_of` does."""

    def local(moves: Moves, reads: RoundReads, inputs: Inputs) -> Any:
        trained = config.train(kind, moves.local, moves.reported, inputs, reads.form)
        if moves.due is None:
            return trained, Outcome(), jax.tree_util.Partial(tuple)
        sent = config.sent(kind, moves, reads)
        message = config.message(*sent, reads.form)
        exchange = config.exchange(sent, reads, inputs.batch)
        flags = _flags(exchange, message, inner)
        transfers = (*flags, *exchange.stages.transfers)
        reduced = Reduced.of(message, jnp.array(True))
        model = config.model_of(trained.local, reads.form)
        outcome = config.after(model, moves.due, sent, reads, reduced)
        return trained, outcome, jax.tree_util.Partial(lambda: transfers)

    inner, specs = config.inner, config.specs(kind)
    moves, reads = parted(state, kind, 0 if kind.exchanges else None)
    if moves.due is not None:
        moves = moves._replace(due=moves.due._replace(codec_states={}))
    given = *specs[:2], inputs_over(inner.axis_name)
    without_exchange = jax.jit(inner.on_mesh(local, given, (*specs[2:], P())))
    args = moves, reads, inputs
    sharded = bool(inner_axes(inner.mesh, inner.axis_name))
    others = _own_transfers(without_exchange, *args, sharded=sharded)
    *_, listed = jax.eval_shape(without_exchange, *args)
    return (*others, *listed())


def _own_transfers(
    program: Any, *args: Any, sharded: bool = False
) -> tuple[Transfer, ...]:
    """Returns what the collectives of a program move, each as often as it runs."""
    if not sharded and not collective_axes(program, *args):
        return ()
    text = program.lower(*args).compile().as_text()
    return tuple(
        Transfer(found.kind, found.group_size, int(found.bytes))
        for found in Reading(parse(text)).report().collectives
        for _ in range(found.times)
    )

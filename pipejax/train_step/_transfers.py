"""Lists what a step sends: its exchange, and collectives of loss and optimizer."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pipejax._core.executors import StepConfig
from pipejax._core.message import InFlight, Reduced, advanced, arrivals, has_arrived
from pipejax._internal.hlo import Reading, parse
from pipejax._internal.mesh import inner_axes
from pipejax._internal.traced_axes import collective_axes
from pipejax.collectives import Transfer

from ._state import SharedState


def transfers_of(
    config: StepConfig, state: SharedState, in_flight: InFlight, batch: Any
) -> tuple[Transfer, ...]:
    """Lists every collective of a step, from shapes alone.

    The stages of the exchange list what they move. The collectives of the loss and the
    optimizer are read from a program that runs both without the exchange. The program
    is compiled only if it has a collective.

    Returns:
      The collectives of the loss and the optimizer, followed by those of the exchange.
    """
    found: list[Transfer] = []

    def local(state: SharedState, in_flight: InFlight, batch: Any) -> Any:
        message, kept = config.work.compute(state, in_flight, batch)
        arrived, behind = has_arrived(in_flight), arrivals(advanced(in_flight))
        exchange = config.work.exchange(state, message, arrived, behind, config.sums_by)
        found[:] = exchange.stages.transfers
        reduced = Reduced.of(message, arrived)
        if state.shards.cuts:  # the exchange updates the optimizer
            reduced = Reduced(message._replace(gradients=None), arrived, arrived)
        return message, config.work.update(state, kept, reduced)

    split = P(config.axis_name)
    specs = (state.over_data(config.axis_name), split, split), (split, P())
    without_exchange = config.on_mesh(local, *specs)
    in_flight = in_flight._replace(codec_states={})
    args = state, in_flight, batch
    sharded = bool(inner_axes(config.mesh, config.axis_name))
    own = _own_transfers(jax.jit(without_exchange), *args, sharded=sharded)
    return (*own, *found)


def _own_transfers(
    program: Any, *args: Any, sharded: bool = False
) -> tuple[Transfer, ...]:
    """Returns what the collectives of a jitted program move, each as often as it runs.

    The program is compiled only if it has collectives.

    Args:
      program: The jitted function.
      *args: Its arguments, or their shapes.
      sharded: Whether XLA may add collectives, because groups shard the model.

    Returns:
      A `Transfer` for each execution of a collective.
    """
    if not sharded and not collective_axes(program, *args):
        return ()
    text = program.lower(*args).compile().as_text()
    return tuple(
        Transfer(found.kind, found.group_size, int(found.bytes))
        for found in Reading(parse(text)).report().collectives
        for _ in range(found.times)
    )

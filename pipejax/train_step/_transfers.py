"""What a step sends: the exchange, and collectives of the loss and the optimizer."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pipejax.collectives import Transfer
from pipejax.executors import StepConfig, own_transfers
from pipejax.message import InFlight, Reduced, has_arrived, reduction

from ._state import ReplicatedState


def transfers_of(
    config: StepConfig, state: ReplicatedState, in_flight: InFlight, batch: Any
) -> tuple[Transfer, ...]:
    """Lists every collective of a step, from shapes alone.

    The exchange says of itself what it moves. What the loss and the optimizer move is
    read in a program of them without the exchange, which is compiled if it has any
    collective.
    """
    found: list[Transfer] = []

    def local(state: ReplicatedState, in_flight: InFlight, batch: Any) -> Any:
        message, kept = config.work.compute(state, in_flight, batch)
        stages = reduction(message, config.sums_by, config.axis_name)
        found[:] = stages.transfers
        total = Reduced.of(message, has_arrived(in_flight))
        return message, config.work.update(state, kept, total)

    own = P(config.axis_name)
    without_exchange = config.on_mesh(local, (P(), own, own), (own, P()))
    in_flight = in_flight._replace(codec_states={})
    args = state, in_flight, batch
    return (*own_transfers(jax.jit(without_exchange), *args), *found)

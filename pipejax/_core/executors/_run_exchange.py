"""Exchanges messages in a program of its own, for the communication thread."""

from typing import Any, Protocol

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import (
    Mark,
    Message,
    Reduced,
    Valid,
    check_alike,
    valid_at_once,
)
from pipejax._core.step import Computed, Trainable, data_specs, without
from pipejax._internal.mesh import on_mesh_by
from pipejax._internal.types import CodecStates, Specs

from ._by_copy import exchange_by_copy
from ._by_shard import exchange_by_shard, groups_in_processes, placed_once
from ._config import StepConfig


class RunExchange(Protocol):
    """Function that exchanges a message, and waits for the result."""

    def __call__(
        self,
        trained: Trainable | None,
        message: Message,
        states: CodecStates,
        valid: Valid,
        mark: Mark = None,
    ) -> tuple[Reduced, CodecStates]:
        """Returns the reduced message and the codec states after it.

        `trained` is what the exchange updates, or `None`.
        """


def make_exchange(config: StepConfig, where: Mesh) -> RunExchange:
    """Returns a function that exchanges a message, and waits for the result.

    It raises the error if the exchange fails, or if marks differ.

    `where` is the mesh that sums: that of the step, or CPUs beside it.
    """
    if where is not config.mesh:
        return exchange_by_copy(config, where, exchange_on_mesh(config.at(where)))
    by_shard = groups_in_processes(where, config.axis_name)
    if by_shard and not config.step.shards_optimizer:
        return exchange_by_shard(config)
    return exchange_on_mesh(config)


def run_at_once(
    config: StepConfig, computed: Computed, states: CodecStates
) -> tuple[Reduced | None, CodecStates]:
    """Exchanges the gradients that are not delayed, inside a program of a step."""
    if computed.at_once is None:
        return None, states
    all_reduce, valid = config.at_once.sums_by.unmerged(), valid_at_once()
    return config.step.exchange(None, computed.at_once, valid, all_reduce).run(states)


def delayed_part(config: StepConfig, message: Message, at_once: Reduced) -> Message:
    """Returns what is delayed of a message, after an exchange at once."""
    if config.step.settings.at_once is None:
        return message
    return without(message, at_once, lax.axis_size(config.axis_name))


def exchange_on_mesh(config: StepConfig) -> RunExchange:
    """Returns a function that exchanges each device's message on the mesh itself."""
    own: Specs = P(config.axis_name)
    whole: Specs = P()
    nothing: Any = None

    def local(
        trained: Trainable | None,
        message: Message,
        before: CodecStates,
        valid: Valid,
        mark: Mark,
    ) -> tuple[Reduced, CodecStates]:
        return config.exchange(trained, message, valid, mark).run(before)

    def specs(trained: Trainable | None, *_: Specs) -> tuple[Specs, Specs]:
        pieces = whole if trained is None else data_specs(trained, config.axis_name)
        reduced = Reduced(whole, whole, whole, whole, pieces, own)
        return (pieces, config.message_spec, own, whole, whole), (reduced, own)

    def like(trained: Trainable | None, *_: Any) -> Any:
        return Reduced(nothing, nothing, nothing, nothing, trained), nothing

    program = jax.jit(on_mesh_by(specs, local, config.mesh, config.axis_name, like))
    placed = placed_once(config.mesh)

    def exchange(
        trained: Trainable | None,
        message: Message,
        states: CodecStates,
        valid: Valid,
        mark: Mark = None,
    ) -> tuple[Reduced, CodecStates]:
        found = program(trained, message, states, *placed((valid, mark)))
        reduced, after = jax.block_until_ready(found)
        check_alike(reduced.alike)
        return reduced._replace(alike=None), after

    return exchange

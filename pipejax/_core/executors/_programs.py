"""The programs of a step that is run in parts, as the host executor runs it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Reduced, emptied, entered
from pipejax._core.step import (
    Common,
    Computed,
    StepInfo,
    Trainable,
    data_specs,
    inputs_over,
    state_data_specs,
)
from pipejax._internal.mesh import on_mesh_by
from pipejax._internal.types import Specs

from ._config import StepConfig
from ._run_exchange import RunExchange, delayed_part, make_exchange


class Programs(NamedTuple):
    """The parts of a step. Only `exchange` and `gather` send anything.

    Attributes:
      compute: Makes the message of a batch.
      exchange: Exchanges a message on the communication thread, and waits for it.
      exchange_at_once: Does so with what is not delayed.
      delayed: Makes the message that is delayed, after the other was exchanged.
      update: Applies a reduced message, and counts the messages in the queue.
      empty: Makes an empty queue of the form of another.
      gather: Gathers parameters as they are, where devices have pieces of them, and
        waits for them.
    """

    compute: jax.stages.Wrapped
    exchange: RunExchange
    exchange_at_once: RunExchange
    delayed: jax.stages.Wrapped
    update: jax.stages.Wrapped
    empty: jax.stages.Wrapped
    gather: Callable[[Trainable], Trainable]


def programs_of(config: StepConfig, reduction_mesh: Mesh) -> Programs:
    """Returns the programs of a step, which are compiled when they first run."""
    own: Any = P(config.axis_name)
    whole: Any = P()
    queue: Any = config.queue_specs
    messages: Any = config.message_spec
    axis = config.axis_name

    def compute_specs(state: Common, *_: Specs) -> tuple[Specs, Specs]:
        inputs = inputs_over(axis)
        computed = Computed(whole, whole, whole, messages)
        return (state_data_specs(state, axis), queue, inputs), (messages, computed)

    def update(
        state: Common,
        computed: Computed | None,
        reduced: Reduced,
        at_once: Reduced | None,
        filled: jax.Array,
    ) -> tuple[Common, jax.Array, StepInfo]:
        state, info = config.step.apply(state, computed, reduced, at_once)
        state = config.result(state, computed, reduced.sum.changes)
        return state, entered(filled, config.width - 1), info

    def delayed(message: Message, at_once: Reduced) -> Message:
        return delayed_part(config, message, at_once)

    def gather(trained: Trainable) -> Trainable:
        assert config.step.gather is not None
        return config.step.gather(trained, config.sums_by)

    def gather_specs(trained: Trainable) -> tuple[Specs, Specs]:
        pieces = data_specs(trained, axis)
        return (pieces,), pieces

    gathering = jax.jit(
        on_mesh_by(gather_specs, gather, config.mesh, axis, lambda trained: trained)
    )
    return Programs(
        compute=jax.jit(
            on_mesh_by(compute_specs, config.step.compute, config.mesh, axis),
            in_shardings=(None, None, config.inputs),
        ),
        exchange=make_exchange(config, reduction_mesh),
        exchange_at_once=make_exchange(config.at_once, reduction_mesh),
        delayed=jax.jit(config.on_mesh(delayed, (messages, whole), messages)),
        update=jax.jit(
            config.on_state(update, (whole, whole, whole, own), own),
            donate_argnums=(0,) if config.donate else (),
        ),
        empty=jax.jit(config.on_mesh(lambda x: emptied(x, {}), (queue,), queue)),
        gather=lambda trained: jax.block_until_ready(gathering(trained)),
    )

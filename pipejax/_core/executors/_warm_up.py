"""Takes the synchronous steps with which local steps may begin.

All groups apply the mean of their gradients, and so stay the same. The anchor goes with
them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax._core.message import InFlight, Passengers, mean_of, valid_at_once
from pipejax._core.rounds import (
    Chunk,
    LocalInfo,
    LocalState,
    Position,
    RoundInfo,
    Shared,
    check_report,
)
from pipejax._core.step import Common, Inputs, apply, inputs_over
from pipejax._internal.types import ModelState
from pipejax.collectives import psum

from ._round_config import RoundConfig, alone, stacked
from ._turns import hand_on, wait_turn


@dataclasses.dataclass(frozen=True, eq=False)
class WarmUp:
    """Takes synchronous steps of all groups, as one program each.

    Nothing else is under way then, so that the program may hold the all-reduce with any
    executor. It sums exactly.
    """

    config: RoundConfig

    def step(self, state: LocalState, inputs: Inputs) -> tuple[LocalState, RoundInfo]:
        """Takes one synchronous step."""
        shared, own, mesh = state.shared, state.own, self.config.inner.mesh
        wait_turn(mesh, own.local.step)
        rest = shared._replace(anchor=()), own.reported
        found = self._program(own.local, *rest, inputs)
        hand_on(mesh, found)
        local, anchor, model_state, info = found
        left = int(state.position.warmup) - 1
        state = LocalState(
            shared._replace(anchor=anchor, model_state=model_state),
            own._replace(local=local),
            Position.at(0, 0, left),
        )
        return state, info

    @functools.cached_property
    def _program(self) -> jax.stages.Wrapped:
        config = self.config.inner
        whole: Any = P()
        own: Any = P(config.axis_name)
        nothing: Any = RoundInfo(*(whole for _ in RoundInfo._fields))
        info = nothing._replace(**{name: own for name in LocalInfo._fields})
        specs = own, whole, own, inputs_over(config.axis_name)
        return jax.jit(
            config.on_mesh(self._local_step, specs, (own, whole, whole, info)),
            in_shardings=(None, None, None, config.inputs),
            donate_argnums=(0,) if config.donate else (),
        )

    def _local_step(
        self, local: Common, shared: Shared, reported: Passengers, inputs: Inputs
    ) -> tuple[Common, tuple[Chunk, ...], ModelState, RoundInfo]:
        """Runs one group's part of a step."""
        config, form, local = self.config.inner, shared.form, alone(local)
        nothing = InFlight((), jnp.zeros(1, jnp.int32), {})
        message, computed = config.step.compute(local, nothing, inputs)
        check_report(reported, message)
        all_reduce = psum().on(config.mesh)
        exchange = config.step.exchange(None, message, valid_at_once(), all_reduce)
        reduced, _ = exchange.run({})
        local, info = apply(config.step.settings, local, computed, reduced)
        total, refused = reduced.sum.passengers.values, shared.refused
        arrival = self.config.arrival(total, message.passengers, refused)
        loss = mean_of(message.passengers.loss, message, 1)
        own = LocalInfo(*stacked((loss, info.grad_norm, info.applied, info.skipped)))
        anchor = form.chunked(local.trainable.params, self.config.chunks)
        report = RoundInfo(**arrival._asdict(), **own._asdict())
        return stacked(local), anchor, local.model_state, report

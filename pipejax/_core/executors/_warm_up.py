"""Takes the synchronous steps with which local steps may begin.

All groups apply the mean of their gradients, and so stay the same. The anchor goes with
them.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Message, Passengers, Reduced
from pipejax._core.rounds import (
    Chunk,
    LocalInfo,
    LocalState,
    Position,
    RoundInfo,
    Shared,
    check_changes,
    check_report,
    synchronous_step,
)
from pipejax._core.step import Common, Inputs, info_of, inputs_over
from pipejax._internal.types import ModelState
from pipejax.collectives import psum

from ._initial_rounds import initial_outer
from ._round_config import RoundConfig, alone, stacked
from ._turns import in_turn


@dataclasses.dataclass(frozen=True, eq=False)
class WarmUp:
    """Takes synchronous steps of all groups, as one program each.

    Nothing else is under way then, so that the program may hold the all-reduce with any
    executor. It sums exactly.
    """

    config: RoundConfig

    def step(
        self, state: LocalState, inputs: Inputs
    ) -> tuple[LocalState, RoundInfo, Any]:
        """Takes one synchronous step; also returns whether all devices are alike."""
        shared, own, mesh = state.shared, state.own, self.config.inner.mesh
        args = own.local, shared._replace(anchor=()), own.reported, inputs
        local, anchor, model_state, info, alike = in_turn(
            mesh, self._program, *args, ended=operator.itemgetter(slice(3, None))
        )
        left = int(state.position.warmup) - 1
        # An outer optimizer may keep a copy of the anchor with which it begins.
        outer = shared.outer if left else initial_outer(self.config, anchor)
        state = LocalState(
            shared._replace(anchor=anchor, outer=outer, model_state=model_state),
            own._replace(local=local),
            Position.at(0, 0, left),
        )
        return state, info, alike

    @functools.cached_property
    def _program(self) -> jax.stages.Wrapped:
        config = self.config.inner
        whole: Any = P()
        own: Any = P(config.axis_name)
        nothing: Any = RoundInfo(*(whole for _ in RoundInfo._fields))
        info = nothing._replace(**{name: own for name in LocalInfo._fields})
        specs = own, whole, own, inputs_over(config.axis_name)
        return jax.jit(
            config.on_mesh(self._local_step, specs, (own, whole, whole, info, own)),
            in_shardings=(None, None, None, config.inputs),
            donate_argnums=(0,) if config.donate else (),
        )

    def _local_step(
        self, local: Common, shared: Shared, reported: Passengers, inputs: Inputs
    ) -> tuple[Common, tuple[Chunk, ...], ModelState, RoundInfo, Any]:
        """Runs one group's part of a step."""
        config, form = self.config.inner, shared.form
        own_step = config.step, alone(local), inputs
        args = *own_step, psum().on(config.mesh), config.mark(inputs.batch)
        local, info, message, reduced = synchronous_step(*args)
        check_report(reported, message)
        check_changes(form, local.model_state, message)
        total = reduced.sum.passengers.values
        arrival = self.config.arrival(total, message.passengers, shared.refused)
        # As a sum of one group, whose loss is NaN without a weight.
        mine = Reduced.of(Message({}, None, message.passengers), jnp.array(True))
        loss = jnp.asarray(info_of(mine, 1).loss)
        own = stacked(LocalInfo.of(info)._replace(local_loss=loss))
        report = RoundInfo(**arrival._asdict(), **own._asdict())
        anchor = form.chunked(local.trainable.params)
        return stacked(local), anchor, local.model_state, report, reduced.alike

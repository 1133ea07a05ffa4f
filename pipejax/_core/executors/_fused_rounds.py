"""Runs local steps as XLA programs, each with at most one chunk of an exchange.

A step of a round is one program: the inner step of every group and, if a round is under
way, the exchange of a chunk, whose collectives have the inner step beside them. The
chunk is an argument, so that one program serves all chunks. The last step of a round
and the step in which the last chunk arrives are other programs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Exchange, Passengers, averaging
from pipejax._core.rounds import Chunk, ChunkState, message_of
from pipejax._core.step import Common, Inputs, inputs_over
from pipejax._internal.types import CodecStates

from ._interleave import interleave
from ._options import options_for
from ._round_config import Outcome, RoundConfig, RoundInputs, StepKind, Trained
from ._turns import hand_on, wait_turn


@dataclasses.dataclass(frozen=True, eq=False)
class FusedRounds:
    """Executor whose programs hold the exchange beside the compute."""

    rounds: RoundConfig
    reason: str
    name: str = "fused"

    def train(
        self,
        kind: StepKind,
        local: Common,
        reported: Passengers,
        given: RoundInputs,
        inputs: Inputs,
    ) -> tuple[Trained, Outcome]:
        """Dispatches a step, and does not wait for it."""
        wait_turn(self.rounds.config.mesh, local.step)
        due, given = given.due, given._replace(due=None)
        found = self._train(kind)(local, reported, due, given, inputs)
        hand_on(self.rounds.config.mesh, found)
        return found

    def rest(
        self, kind: StepKind, params: optax.Params | None, given: RoundInputs
    ) -> Outcome:
        """Dispatches the work of a round that has no step beside it."""
        wait_turn(self.rounds.config.mesh, given)
        found = self._rest(kind)(params, given)
        hand_on(self.rounds.config.mesh, found)
        return found

    def ahead(
        self,
        chunks: Sequence[Chunk],
        sent: Passengers,
        states: Sequence[CodecStates],
    ) -> None:
        """Does nothing: chunks are exchanged in the programs of later steps."""

    def join(self) -> None:
        """Does nothing: no exchange is outside a program."""

    def lower(
        self,
        kind: StepKind,
        local: Common,
        reported: Passengers,
        given: RoundInputs,
        inputs: Inputs,
    ) -> jax.stages.Lowered:
        """Returns the lowered program of a step."""
        due, given = given.due, given._replace(due=None)
        return self._train(kind).lower(local, reported, due, given, inputs)

    @property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh of the step, on which the chunks are also summed."""
        return self.rounds.config.mesh

    @functools.cached_property
    def _programs(self) -> dict[Any, jax.stages.Wrapped]:
        return {}

    def _train(self, kind: StepKind) -> jax.stages.Wrapped:
        """Returns the program of a kind of step, made once."""
        rounds, config = self.rounds, self.rounds.config
        if ("train", kind) not in self._programs:
            own: Any = P(config.axis_name)
            given, outcome = rounds.specs(kind)
            due, given = given.due, given._replace(due=None)
            taken = own, own, due, given, inputs_over(config.axis_name)
            made = Trained(own, own, own, own), outcome
            program = functools.partial(self._local_train, kind)
            self._programs["train", kind] = jax.jit(
                config.on_mesh(program, taken, made),
                in_shardings=(None, None, None, None, config.inputs),
                donate_argnums=(0, 1, 2) if config.donate else (),
                compiler_options=options_for(config.mesh, at_once=False).kept,
            )
        return self._programs["train", kind]

    def _rest(self, kind: StepKind) -> jax.stages.Wrapped:
        """Returns the program of the work without a step, made once."""
        rounds, config = self.rounds, self.rounds.config
        if ("rest", kind) not in self._programs:
            given, outcome = rounds.specs(kind)
            program = functools.partial(self._local_rest, kind)
            self._programs["rest", kind] = jax.jit(
                config.on_mesh(program, (P(config.axis_name), given), outcome)
            )
        return self._programs["rest", kind]

    def _local_train(
        self,
        kind: StepKind,
        local: Common,
        reported: Passengers,
        due: ChunkState | None,
        given: RoundInputs,
        inputs: Inputs,
    ) -> tuple[Trained, Outcome]:
        """Runs one group's part of a step.

        The chunk that is due is an argument of its own, which the program may overwrite
        as it may what the group trains. Other chunks stay in the state.
        """
        given = given._replace(due=due)
        compute = functools.partial(self.rounds.train, kind)
        summed, args = None, (local, reported, inputs)
        if given.due is not None:
            before, exchange = (
                given.due.codec_states,
                self._exchange(given.due, given.sent),
            )
            value, after, trained = interleave(
                exchange.start, before, exchange.stages, compute, *args
            )
            summed = exchange.finish(value, after, before)
        else:
            trained = compute(*args)
        params = trained.local.trainable.params
        outcome = self.rounds.after(kind, params, given, summed)
        trained = trained._replace(local=with_params(trained.local, outcome.params))
        return trained, outcome._replace(params=None)

    def _local_rest(
        self, kind: StepKind, params: optax.Params | None, given: RoundInputs
    ) -> Outcome:
        """Runs one group's part of the work without a step."""
        summed = None
        if given.due is not None:
            exchange = self._exchange(given.due, given.sent)
            summed = exchange.run(given.due.codec_states)
        return self.rounds.after(kind, params, given, summed)

    def _exchange(self, due: ChunkState, sent: Passengers) -> Exchange:
        config, message = self.rounds.config, message_of(due.buffer, sent)
        return averaging(message, jnp.array(True), config.sums_by, config.axis_name)


def with_params(local: Common, params: optax.Params) -> Common:
    """Returns what a group trains, with other parameters."""
    return local._replace(trainable=local.trainable._replace(params=params))

"""Runs local steps with the exchange on the communication thread.

The thread is given a chunk at the beginning of a step, and sums it while the devices
compute. The step ends when both are done.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Valid
from pipejax._core.rounds import GroupModel
from pipejax._core.step import Inputs, inputs_over
from pipejax._internal.communication_thread import submit
from pipejax._internal.types import Tree

from ._by_copy import reduction_mesh
from ._own_collectives import OwnCollectives
from ._round_config import RoundConfig, with_model
from ._round_parts import KINDS, Moves, Outcome, RoundReads, StepKind, Trained
from ._run_exchange import RunExchange, make_exchange


@dataclasses.dataclass(frozen=True, eq=False)
class HostRounds:
    """Executor that trains on the caller's thread, and exchanges on another."""

    config: RoundConfig
    reason: str
    name: str = "host"

    def train(
        self, kind: StepKind, moves: Moves, reads: RoundReads, inputs: Inputs
    ) -> tuple[Trained, Outcome]:
        """Dispatches a step, and waits for nothing but the chunk beside it."""
        program = self._train[kind]
        taken = moves.local, moves.reported, inputs, reads.form
        self._own_collectives.check(program, *taken)
        if not kind.exchanges:
            return program(*taken), Outcome()
        applied = self._begun(kind, moves, reads, inputs.batch)
        trained = program(*taken)
        outcome = applied(self.config.model_of(trained.local, reads.form))
        trained = trained._replace(local=with_model(trained.local, outcome.model))
        return trained, outcome._replace(model=None)

    def exchange(self, kind: StepKind, moves: Moves, reads: RoundReads) -> Outcome:
        """Exchanges a chunk with no step beside it, and applies it."""
        model = self.config.model_of(moves.local, reads.form)
        return self._begun(kind, moves, reads, None)(model)

    def lower(
        self,
        kind: StepKind,
        moves: Moves,
        reads: RoundReads,
        inputs: Inputs,
        *,
        own_options: bool = True,
    ) -> jax.stages.Lowered:
        """Returns the lowered program that trains, which has no compiler options."""
        del own_options
        args = moves.local, moves.reported, inputs, reads.form
        return self._train[kind].lower(*args)

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh if it consists of CPUs, or else a mesh of CPUs beside it."""
        return reduction_mesh(self.config.inner.mesh, self.config.inner.axis_name)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns no options, because no program overlaps a collective with compute."""
        return {}

    def _begun(
        self, kind: StepKind, moves: Moves, reads: RoundReads, batch: Tree
    ) -> Callable[[GroupModel], Outcome]:
        """Hands a chunk to the thread, which sums it.

        Returns a function that waits for the sum, and applies it to the model of a
        group. The thread checks whether all devices are alike.
        """
        assert moves.due is not None
        # The codec states lie where the thread sums, which may be other devices.
        states, due = moves.due.codec_states, moves.due._replace(codec_states=())
        mark = self.config.mark(batch, reads.number)
        valid, reads = Valid(reads.valid, ()), self.config.placed(reads)
        sent = self._sent[kind](moves._replace(due=due), reads)
        message = self.config.message(sent.chunk, sent.passengers, reads.form)
        summed = submit(self._sum, None, message, states, valid, mark)

        def applied(model: GroupModel) -> Outcome:
            reduced, states = summed.result()
            outcome = self._after[kind](model, due, sent, reads, reduced)
            return outcome._replace(due=outcome.due._replace(codec_states=states))

        return applied

    @functools.cached_property
    def _sum(self) -> RunExchange:
        return make_exchange(self.config.inner, self.reduction_mesh)

    @functools.cached_property
    def _own_collectives(self) -> OwnCollectives:
        return OwnCollectives(self.config.inner.mesh)

    @functools.cached_property
    def _sent(self) -> dict[StepKind, jax.stages.Wrapped]:
        """Returns the program of what a group sends, of each kind of exchange."""
        config = self.config.inner
        own: Any = P(config.axis_name)

        def program(kind: StepKind) -> jax.stages.Wrapped:
            moves, reads, _, _ = self.config.specs(kind)
            local = functools.partial(self.config.sent, kind)
            return jax.jit(config.on_mesh(local, (moves, reads), own))

        return {kind: program(kind) for kind in KINDS if kind.exchanges}

    @functools.cached_property
    def _train(self) -> dict[StepKind, jax.stages.Wrapped]:
        """Returns the program that trains, of each kind of step."""
        config = self.config.inner

        def program(reports: bool) -> jax.stages.Wrapped:
            moves, reads, trained, _ = self.config.specs(StepKind())
            of_inputs = inputs_over(config.axis_name)
            specs = moves.local, moves.reported, of_inputs, reads.form
            local = functools.partial(self.config.train, StepKind(reports=reports))
            return jax.jit(
                config.on_mesh(local, specs, trained),
                in_shardings=(None, None, config.inputs, None),
                donate_argnums=(0, 1) if config.donate else (),
            )

        programs = program(False), program(True)
        return {kind: programs[kind.reports] for kind in KINDS}

    @functools.cached_property
    def _after(self) -> dict[StepKind, jax.stages.Wrapped]:
        """Returns the program that applies a chunk, of each kind of exchange."""
        config = self.config.inner
        whole: Any = P()
        own: Any = P(config.axis_name)

        def program(kind: StepKind) -> jax.stages.Wrapped:
            moves, reads, _, outcome = self.config.specs(kind)
            specs = own, moves.due, own, reads, whole
            return jax.jit(
                config.on_mesh(self.config.after, specs, outcome),
                donate_argnums=(0, 1, 2) if config.donate else (),
            )

        return {kind: program(kind) for kind in KINDS if kind.exchanges}

"""Runs local steps as XLA programs, each with at most one chunk of an exchange.

A step of a round is one program: the inner step of every group and, in V of H steps,
the exchange of a chunk, whose collectives have the inner step beside them. The number
of the chunk is an argument. One program serves all chunks but the last, with which the
report of the round travels.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from pipejax._core.step import Inputs, inputs_over

from ._interleave import interleave
from ._options import Options, options_for
from ._round_config import RoundConfig, with_model
from ._round_parts import KINDS, Moves, Outcome, RoundReads, StepKind, Trained
from ._turns import in_turn


@dataclasses.dataclass(frozen=True, eq=False)
class FusedRounds:
    """Executor whose programs hold the exchange beside the compute."""

    config: RoundConfig
    reason: str
    name: str = "fused"

    def train(
        self, kind: StepKind, moves: Moves, reads: RoundReads, inputs: Inputs
    ) -> tuple[Trained, Outcome]:
        """Dispatches a step, and does not wait for it."""
        args = moves, self.config.placed(reads), inputs
        return in_turn(self.config.inner.mesh, self._train[kind], *args)

    def exchange(self, kind: StepKind, moves: Moves, reads: RoundReads) -> Outcome:
        """Dispatches the exchange of a chunk with no step beside it."""
        args = moves, self.config.placed(reads)
        return in_turn(self.config.inner.mesh, self._exchange[kind], *args)

    def lower(
        self,
        kind: StepKind,
        moves: Moves,
        reads: RoundReads,
        inputs: Inputs,
        *,
        own_options: bool = True,
    ) -> jax.stages.Lowered:
        """Returns the lowered program of a step, with its options or without."""
        programs = self._train if own_options else self._steps({})
        return programs[kind].lower(moves, reads, inputs)

    @property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh of the step, on which the chunks are also summed."""
        return self.config.inner.mesh

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the options for the devices that the compiler accepts."""
        return self.options.kept

    @property
    def options(self) -> Options:
        """Returns the accepted options, and those that the compiler refused."""
        return options_for(self.config.inner.mesh, mixed=True)

    @functools.cached_property
    def _train(self) -> dict[StepKind, jax.stages.Wrapped]:
        return self._steps(self.compiler_options)

    def _steps(self, options: dict[str, Any]) -> dict[StepKind, jax.stages.Wrapped]:
        """Returns the program of each kind of step."""
        config = self.config.inner

        def program(kind: StepKind) -> jax.stages.Wrapped:
            moves, reads, trained, outcome = self.config.specs(kind)
            local = config.on_mesh(
                functools.partial(self._local_train, kind),
                (moves, reads, inputs_over(config.axis_name)),
                (trained, outcome),
            )
            return jax.jit(
                local,
                in_shardings=(None, None, config.inputs),
                donate_argnums=(0,) if config.donate else (),
                compiler_options=options,
            )

        return {kind: program(kind) for kind in KINDS}

    @functools.cached_property
    def _exchange(self) -> dict[StepKind, jax.stages.Wrapped]:
        """Returns the program of each kind of exchange without a step."""

        def program(kind: StepKind) -> jax.stages.Wrapped:
            moves, reads, _, outcome = self.config.specs(kind)
            local = functools.partial(self._local_exchange, kind)
            return jax.jit(self.config.inner.on_mesh(local, (moves, reads), outcome))

        return {kind: program(kind) for kind in KINDS if kind.exchanges}

    def _local_train(
        self, kind: StepKind, moves: Moves, reads: RoundReads, inputs: Inputs
    ) -> tuple[Trained, Outcome]:
        """Runs one group's part of a step."""
        compute = functools.partial(self.config.train, kind)
        args = moves.local, moves.reported, inputs, reads.form
        if moves.due is None:
            return compute(*args), Outcome()
        sent = self.config.sent(kind, moves, reads)
        exchange = self.config.exchange(sent, reads, inputs.batch)
        before = moves.due.codec_states
        value, states, trained = interleave(
            exchange.start, before, exchange.stages, compute, *args
        )
        due, reduced = moves.due._replace(codec_states=states), exchange.end(value)
        model = self.config.model_of(trained.local, reads.form)
        outcome = self.config.after(model, due, sent, reads, reduced)
        trained = trained._replace(local=with_model(trained.local, outcome.model))
        return trained, outcome._replace(model=None)

    def _local_exchange(
        self, kind: StepKind, moves: Moves, reads: RoundReads
    ) -> Outcome:
        """Runs one group's part of an exchange without a step."""
        assert moves.due is not None
        sent = self.config.sent(kind, moves, reads)
        exchange = self.config.exchange(sent, reads, None)
        reduced, states = exchange.run(moves.due.codec_states)
        due = moves.due._replace(codec_states=states)
        model = self.config.model_of(moves.local, reads.form)
        return self.config.after(model, due, sent, reads, reduced)

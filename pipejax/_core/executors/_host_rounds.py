"""Runs local steps with the exchange on the communication thread.

The thread is given all chunks of a round when the round ends, and sums one after
another, as fast as the link carries them. A step waits for its own chunk alone, so that
up to V chunks may be ahead of it.
"""

import copy
import dataclasses
import functools
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Reduced, valid_at_once
from pipejax._core.rounds import Chunk, ChunkState, GroupModel, Pending, RoundPassengers
from pipejax._core.step import Inputs, inputs_over
from pipejax._internal.structures import identical
from pipejax._internal.types import CodecStates, Tree

from ._by_copy import reduction_mesh
from ._own_collectives import OwnCollectives
from ._round_config import (
    KINDS,
    Moves,
    Outcome,
    RoundConfig,
    RoundReads,
    StepKind,
    Trained,
    with_model,
)
from ._run_exchange import RunExchange, make_exchange
from ._thread import submit


class BegunChunk(NamedTuple):
    """A chunk that the thread has been given."""

    chunk: Chunk
    states: CodecStates
    sent: RoundPassengers | None
    result: Future[tuple[Reduced, CodecStates]]


@dataclasses.dataclass(frozen=True, eq=False)
class HostRounds:
    """Executor that trains on the caller's thread, and exchanges on another."""

    config: RoundConfig
    reason: str
    name: str = "host"
    # Chunks whose sums are not used yet, oldest first.
    _begun: list[BegunChunk] = dataclasses.field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> "HostRounds":
        """Returns an executor of the same rounds, which has begun no exchange."""
        return HostRounds(copy.deepcopy(self.config, memo), self.reason, self.name)

    def train(
        self,
        kind: StepKind,
        moves: Moves,
        reads: RoundReads,
        inputs: Inputs,
        pending: Pending,
    ) -> tuple[Trained, Outcome]:
        """Dispatches a step, and waits for nothing but the chunk that is due."""
        program, taken = self._train[kind.begins], (moves.local, moves.reported, inputs)
        self._own_collectives.check(program, *taken)
        trained, outcome = program(*taken), Outcome()
        if any(kind):
            model = kind.model_of(trained.local)
            args = kind, model, moves.due, reads, pending
            outcome = self.exchange(*args, dispatched=trained.info)
        trained = trained._replace(local=with_model(trained.local, outcome.model))
        return trained, outcome._replace(model=None)

    def exchange(
        self,
        kind: StepKind,
        model: GroupModel | None,
        due: ChunkState | None,
        reads: RoundReads,
        pending: Pending,
        dispatched: Tree = None,
    ) -> Outcome:
        """Waits for the chunk that is due, and applies it.

        `dispatched` is as for `begin`.
        """
        summed = None
        if due is not None:
            # A state that comes from elsewhere has chunks that have not begun here.
            if not self._has_begun(pending):
                self.begin(pending, dispatched)
            summed = self._begun.pop(0).result.result()
        return self._after[kind](model, due, reads, summed)

    def begin(self, pending: Pending, dispatched: Tree = None) -> None:
        """Hands chunks to the thread, which sums them in their order.

        `dispatched` is the result of the program that the caller has dispatched last.
        """

        def exchange(*args: Any) -> tuple[Reduced, CodecStates]:
            jax.block_until_ready(dispatched)
            return self._sum(*args)

        def begun(
            chunk: Chunk, states: CodecStates, sent: RoundPassengers | None
        ) -> BegunChunk:
            message = self.config.message(chunk, sent, pending.form)
            result = submit(exchange, None, message, states, valid_at_once())
            return BegunChunk(chunk, states, sent, result)

        self._begun[:] = [begun(*each) for each in pending]

    def lower(
        self, kind: StepKind, moves: Moves, reads: RoundReads, inputs: Inputs
    ) -> jax.stages.Lowered:
        """Returns the lowered program that trains."""
        del reads
        return self._train[kind.begins].lower(moves.local, moves.reported, inputs)

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh if it consists of CPUs, or else a mesh of CPUs beside it."""
        return reduction_mesh(self.config.inner.mesh, self.config.inner.axis_name)

    def _has_begun(self, pending: Pending) -> bool:
        """Returns whether the oldest chunk that has begun is the first of these."""
        return bool(self._begun) and identical(self._begun[0][:3], next(iter(pending)))

    @functools.cached_property
    def _sum(self) -> RunExchange:
        return make_exchange(self.config.inner, self.reduction_mesh)

    @functools.cached_property
    def _own_collectives(self) -> OwnCollectives:
        return OwnCollectives(self.config.inner.mesh)

    @functools.cached_property
    def _train(self) -> dict[bool, jax.stages.Wrapped]:
        """Returns the program of a step that does not end a round, or does."""
        config = self.config.inner

        def program(begins: bool) -> jax.stages.Wrapped:
            kind = StepKind(begins=begins)
            moves, _, trained, _ = self.config.specs(kind)
            specs = moves.local, moves.reported, inputs_over(config.axis_name)
            local = functools.partial(self.config.train, kind)
            return jax.jit(
                config.on_mesh(local, specs, trained),
                in_shardings=(None, None, config.inputs),
                donate_argnums=(0, 1) if config.donate else (),
            )

        return {begins: program(begins) for begins in (False, True)}

    @functools.cached_property
    def _after(self) -> dict[StepKind, jax.stages.Wrapped]:
        """Returns the program that applies the chunk of each kind of step."""
        config = self.config.inner
        whole: Any = P()
        own: Any = P(config.axis_name)

        def program(kind: StepKind) -> jax.stages.Wrapped:
            moves, reads, _, outcome = self.config.specs(kind)
            summed = (whole, own) if kind.exchanges else None
            local = functools.partial(self.config.after, kind)
            return jax.jit(
                config.on_mesh(local, (own, moves.due, reads, summed), outcome),
                donate_argnums=(1,) if config.donate else (),
            )

        return {kind: program(kind) for kind in KINDS}

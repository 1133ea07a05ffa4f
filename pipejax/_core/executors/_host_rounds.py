"""Runs local steps with the exchange on the communication thread.

The thread is given all chunks of a round when the round ends, and sums one after
another, as fast as the link carries them. A step waits for its own chunk alone, so that
up to V chunks may be ahead of it.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pipejax._core.message import Passengers, Reduced, valid_at_once
from pipejax._core.rounds import Chunk, ChunkState, message_of
from pipejax._core.step import Common, Inputs, inputs_over
from pipejax._internal.types import CodecStates

from ._by_copy import reduction_mesh
from ._fused_rounds import with_params
from ._own_collectives import OwnCollectives
from ._round_config import Outcome, RoundConfig, RoundInputs, StepKind, Trained
from ._run_exchange import RunExchange, make_exchange
from ._submitted import identical, submitted
from ._thread import join


class Begun(NamedTuple):
    """A chunk that the thread has been given."""

    chunk: Chunk
    sent: Passengers
    states: CodecStates
    result: Future[tuple[Reduced, CodecStates]]


@dataclasses.dataclass(frozen=True, eq=False)
class HostRounds:
    """Executor that trains on the caller's thread, and exchanges on another."""

    rounds: RoundConfig
    reason: str
    name: str = "host"
    # Chunks whose sums are not used yet, oldest first.
    _begun: list[Begun] = dataclasses.field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> "HostRounds":
        """Returns an executor of the same rounds, which has begun no exchange."""
        return HostRounds(copy.deepcopy(self.rounds, memo), self.reason, self.name)

    def train(
        self,
        kind: StepKind,
        local: Common,
        reported: Passengers,
        given: RoundInputs,
        inputs: Inputs,
    ) -> tuple[Trained, Outcome]:
        """Dispatches a step, and waits for nothing but the chunk that is due."""
        args = local, reported, inputs
        self._own_collectives.check(self._train(kind.begins), *args)
        trained, outcome = self._train(kind.begins)(*args), Outcome(*[None] * 4)
        if any(kind):
            moves = kind.merges or kind.begins
            params = trained.local.trainable.params if moves else None
            outcome = self.rest(kind, params, given)
        if outcome.params is not None:
            local = with_params(trained.local, outcome.params)
            trained = trained._replace(local=local)
        return trained, outcome._replace(params=None)

    def rest(
        self, kind: StepKind, params: optax.Params | None, given: RoundInputs
    ) -> Outcome:
        """Waits for the chunk that is due, if any, and applies it."""
        summed = None
        if given.due is not None:
            summed = self._sum_of(given.due, given.sent)
        due, given = given.due, given._replace(due=None)
        return self._after(kind)(params, due, given, summed)

    def ahead(
        self,
        chunks: Sequence[Chunk],
        sent: Passengers,
        states: Sequence[CodecStates],
    ) -> None:
        """Hands chunks to the thread, which sums them in order, unless it has them."""
        known, found = list(self._begun), list[Begun]()
        for chunk, own in zip(chunks, states, strict=True):
            known = known if _is_of(known, chunk, sent, own) else []
            found.append(known.pop(0) if known else self._begin(chunk, sent, own))
        self._begun[:] = found

    def join(self) -> None:
        """Waits until the thread is idle."""
        join()

    def lower(
        self,
        kind: StepKind,
        local: Common,
        reported: Passengers,
        given: RoundInputs,
        inputs: Inputs,
    ) -> jax.stages.Lowered:
        """Returns the lowered program that trains."""
        del given
        return self._train(kind.begins).lower(local, reported, inputs)

    def _sum_of(self, due: ChunkState, sent: Passengers) -> tuple[Reduced, CodecStates]:
        """Waits for the sum of a chunk, which is the oldest that the thread has."""
        if not _is_of(self._begun, due.buffer, sent, due.codec_states):
            self.ahead([due.buffer], sent, [due.codec_states])
        try:
            return self._begun.pop(0).result.result()
        except Exception:
            self._begun.clear()
            raise

    def _begin(self, chunk: Chunk, sent: Passengers, states: CodecStates) -> Begun:
        args = None, message_of(chunk, sent), states, valid_at_once()
        return Begun(chunk, sent, states, submitted(self._exchange, *args))

    @functools.cached_property
    def reduction_mesh(self) -> Mesh:
        """Returns the mesh if it consists of CPUs, or else a mesh of CPUs beside it."""
        config = self.rounds.config
        return reduction_mesh(config.mesh, config.axis_name)

    @functools.cached_property
    def _exchange(self) -> RunExchange:
        return make_exchange(self.rounds.config, self.reduction_mesh)

    @functools.cached_property
    def _own_collectives(self) -> OwnCollectives:
        return OwnCollectives(self.rounds.config.mesh)

    @functools.cached_property
    def _programs(self) -> dict[Any, jax.stages.Wrapped]:
        return {}

    def _train(self, begins: bool) -> jax.stages.Wrapped:
        """Returns the program of a step without an exchange, made once."""
        config = self.rounds.config
        if begins not in self._programs:
            own: Any = P(config.axis_name)
            kind = StepKind(exchanges=False, merges=False, begins=begins)
            program = config.on_mesh(
                functools.partial(self.rounds.train, kind),
                (own, own, inputs_over(config.axis_name)),
                Trained(own, own, own, own),
            )
            self._programs[begins] = jax.jit(
                program,
                in_shardings=(None, None, config.inputs),
                donate_argnums=(0, 1) if config.donate else (),
            )
        return self._programs[begins]

    def _after(self, kind: StepKind) -> jax.stages.Wrapped:
        """Returns the program that applies a chunk, made once."""
        rounds, config = self.rounds, self.rounds.config
        if kind not in self._programs:
            own: Any = P(config.axis_name)
            given, outcome = rounds.specs(kind)
            due, given = given.due, given._replace(due=None)

            def program(
                params: Any, due: Any, given: RoundInputs, summed: Any
            ) -> Outcome:
                return rounds.after(kind, params, given._replace(due=due), summed)

            summed: Any = (P(), own) if kind.exchanges else None
            self._programs[kind] = jax.jit(
                config.on_mesh(program, (own, due, given, summed), outcome),
                donate_argnums=(1,) if config.donate else (),
            )
        return self._programs[kind]


def _is_of(
    begun: Sequence[Begun], chunk: Chunk, sent: Passengers, states: CodecStates
) -> bool:
    """Returns whether the oldest chunk that the thread has is this one."""
    return bool(begun) and identical(begun[0][:3], (chunk, sent, states))

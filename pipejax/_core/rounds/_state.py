"""The state of a run of local steps."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from pipejax._core.message import Passengers
from pipejax._core.step import Common, check_not_donated, inner_state_specs
from pipejax._internal.types import CodecStates, ModelState, Tree

from ._flat import Chunk
from ._form import Form


class GroupModel(NamedTuple):
    """The part of what a group trains that a round moves.

    Attributes:
      points: The optimizer's state with the leaves that move along (`_points`), and
        `None` in place of all others.
    """

    params: optax.Params
    model_state: ModelState
    points: Tree = None


class Shared(NamedTuple):
    """The part of a state that is the same on all groups.

    Attributes:
      anchor: The parameters that all groups agree on, in chunks.
      outer: The state of the outer optimizer for each chunk.
      model_state: The model state that all groups agree on.
      refused: int32, the number of chunks so far that were left out, because they were
        not finite.
      form: The form of what groups train. It has no leaves.
    """

    anchor: tuple[Chunk, ...]
    outer: tuple[optax.OptState, ...]
    model_state: ModelState
    refused: jax.Array
    form: Form

    @property
    def params(self) -> Any:
        """Returns the anchor in the shapes of the parameters."""
        check_not_donated(self)  # JAX may end the process if it reads such an array
        return self.form.params(self.anchor)


class RoundPassengers(NamedTuple):
    """The part of a round that travels with its last chunk, and that no codec changes.

    Attributes:
      report: Mean over the steps of the round of what a group reports.
      changes: By how much the model state of a group differs from the one that all
        agree on, as in a message.
    """

    report: Passengers
    changes: Tree


class GroupState(NamedTuple):
    """The part of a state of which each group has its own.

    On a mesh of p groups, arrays of `local` have a leading axis of length p. All others
    are concatenated along their first axis.

    Attributes:
      local: What the group trains by itself, and its counters and keys.
      reported: Sum over the steps since the last report of what the group reports.
      codec_states: What the codecs keep of each chunk until the next round.
    """

    local: Common
    reported: Passengers
    codec_states: tuple[CodecStates, ...]


class Position(NamedTuple):
    """The place of the next step in its round, kept on the host.

    Attributes:
      taken: Number of steps of the round that have been taken.
      reported: Number of steps since the last report, or since a drain.
      warmup: Number of synchronous steps before the first round that are not taken yet.
    """

    taken: np.int32
    reported: np.int32
    warmup: np.int32

    @classmethod
    def at(cls, taken: int, reported: int, warmup: int = 0) -> "Position":
        """Returns the place after so many steps."""
        return cls(np.int32(taken), np.int32(reported), np.int32(warmup))


class LocalState(NamedTuple):
    """Everything that a run of local steps needs to continue, as one pytree.

    Attributes:
      shared: What is the same on all groups: the anchor, in chunks, the state of the
        outer optimizer, and `state.model_state`. `state.params` is the anchor in the
        shapes of the parameters.
      own: What each group has of its own, with a leading axis of groups. `state.local`
        is what it trains.
      position: The place of the next step in its round, kept on the host.
    """

    shared: Shared
    own: GroupState
    position: Position

    @property
    def params(self) -> Any:
        """Returns the anchor, which is the same on all groups."""
        return self.shared.params

    @property
    def model_state(self) -> ModelState:
        """Returns the model state that all groups agree on, after the last round."""
        form, specs = self.shared.form, self.local.shards.model_state
        return form.typed(self.shared.model_state, specs)

    @property
    def opt_state(self) -> Any:
        """Returns the mean over groups of their states of the inner optimizer.

        Counters are those of the first group. On several processes, groups exchange
        their states, so that all processes must read this property.
        """
        specs = inner_state_specs(self.local).trainable.opt_state
        return self.shared.form.mean(self.local.trainable.opt_state, specs)

    @property
    def step(self) -> jax.Array:
        """Returns the number of steps that every group has taken."""
        return self.shared.form.of_every_group(self.local.step)

    @property
    def local(self) -> Common:
        """Returns what each group trains, with a leading axis of groups."""
        return self.own.local

    @property
    def groups(self) -> int:
        """Returns the number of groups."""
        return len(self.own.local.step)

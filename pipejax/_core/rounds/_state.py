"""The state of a run of local steps."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from pipejax._core.message import Passengers
from pipejax._core.step import Common
from pipejax._internal.types import CodecStates, Tree

from ._flat import Chunk, whole


@functools.partial(jax.tree_util.register_static)
class Form:
    """Shapes and dtypes of the parameters, which a flat anchor does not show."""

    def __init__(self, tree: Tree) -> None:
        self.tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        leaves, structure = jax.tree.flatten(self.tree)
        self._key = structure, tuple((x.shape, str(x.dtype)) for x in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Shared(NamedTuple):
    """The part of a state that is the same on all groups.

    Attributes:
      anchor: The parameters that all groups agree on, in chunks.
      outer: The state of the outer optimizer for each chunk.
      refused: int32, the number of chunks so far that were left out, because they were
        not finite.
      form: Shapes of the parameters. It has no leaves.
    """

    anchor: tuple[Chunk, ...]
    outer: tuple[optax.OptState, ...]
    refused: jax.Array
    form: Form

    @property
    def params(self) -> Any:
        """Returns the anchor in the shapes of the parameters."""
        return whole(self.anchor, self.form.tree)


class GroupState(NamedTuple):
    """The part of a state of which each group has its own.

    On a mesh of p groups, arrays of `local` have a leading axis of length p. All others
    are concatenated along their first axis.

    Attributes:
      local: What the group trains by itself, and its counters and keys.
      buffer: The difference of the last round, anchor minus parameters, in chunks. A
        chunk that has been exchanged holds the correction: what is to be added to the
        parameters.
      reported: Mean over its steps of what the group reports of the round so far.
      sent: The same of the round that is being exchanged.
      codec_states: What the codecs keep of each chunk until the next round.
    """

    local: Common
    buffer: tuple[Chunk, ...]
    reported: Passengers
    sent: Passengers
    codec_states: tuple[CodecStates, ...]


class Pending(NamedTuple):
    """The chunks of a round that are not exchanged yet, in their order.

    Attributes:
      chunks: Those of the group's difference.
      codec_states: What the codecs keep of each chunk.
      sent: The report that travels with every chunk.
    """

    chunks: tuple[Chunk, ...]
    codec_states: tuple[CodecStates, ...]
    sent: Passengers


class Position(NamedTuple):
    """The place of the next step in its round, kept on the host.

    Attributes:
      taken: Number of steps since the difference of the last round was taken.
      left: Number of chunks of that difference that are not exchanged yet.
    """

    taken: np.int32
    left: np.int32

    @classmethod
    def at(cls, taken: int, left: int) -> "Position":
        """Returns the place after so many steps, with so many chunks left."""
        return cls(np.int32(taken), np.int32(left))


class LocalState(NamedTuple):
    """Everything that a run of local steps needs to continue, as one pytree.

    Attributes:
      shared: What is the same on all groups: the anchor, in chunks, and the state of
        the outer optimizer. `state.params` is the anchor in the shapes of the
        parameters. While an exchange is under way, some of its chunks are of the round
        that arrives.
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
    def local(self) -> Common:
        """Returns what each group trains, with a leading axis of groups."""
        return self.own.local

"""Refuses a state in which one of two copies was replaced by hand.

With a sharded optimizer, devices compute with `state.gathered`, and not with the pieces
in `state.params`. With `delayed`, delayed parameters have counters of their own in
`state.delayed_counters`. A step would ignore a change of one of the two in part.
"""

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from pipejax._core.step import PipelineState
from pipejax._internal.types import Tree


class Pair(NamedTuple):
    """Two parts of a state that change together.

    Attributes:
      name: The name of the part that a user may want to replace.
      part: The arrays of this part.
      copy: The arrays that must be replaced with it.
      reason: Why this part must not be replaced alone, and what to do instead.
    """

    name: str
    part: Tree
    copy: Tree
    reason: str


@dataclasses.dataclass
class LastPairs:
    """The pairs of the state that a train step returned last.

    References are weak, so that no array is kept alive.
    """

    _pairs: list[tuple[list[Any], list[Any]]] = dataclasses.field(default_factory=list)

    def remember(self, state: PipelineState) -> PipelineState:
        """Returns the state, whose pairs replace those known before."""
        self._pairs = [(_weak(x.part), _weak(x.copy)) for x in _pairs_of(state)]
        return state

    def check(self, state: PipelineState) -> None:
        """Raises a `ValueError` if a known copy is beside another part than before."""
        for pair, (part, copy) in zip(_pairs_of(state), self._pairs, strict=False):
            if _same(copy, pair.copy) and not _same(part, pair.part):
                raise ValueError(
                    f"`{pair.name}` must not be replaced by hand alone: {pair.reason}"
                )


def _pairs_of(state: PipelineState) -> Iterator[Pair]:
    trained = state.trainable
    if trained.gathered is not None:
        yield Pair(
            "state.params",
            trained.params,
            trained.gathered,
            "with shard_optimizer=True, devices compute with `state.gathered`, which"
            " still has the values before; got other `state.params` beside it. Let `tx`"
            " make the change, or drain and go on from `train.init(params,"
            " opt_state=state.opt_state)`, with `model_state` and `rng` if there are"
            " any.",
        )
    if trained.delayed_counters is not None:
        counters = jax.tree.map(
            lambda own, x: None if own is None else x,
            trained.delayed_counters,
            trained.opt_state,
            is_leaf=lambda x: x is None,
        )
        yield Pair(
            "state.opt_state",
            counters,
            trained.delayed_counters,
            "with `delayed`, delayed parameters have counters of their own in"
            " `state.delayed_counters`, which still have the values before; got other"
            " ones beside them. Replace both, or drain and go on from"
            " `train.init(state.params, opt_state=opt_state)`, with `model_state` and"
            " `rng` if there are any.",
        )


def _weak(tree: Tree) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    if not all(isinstance(x, jax.Array) for x in leaves):
        return []  # shapes, which nobody trains with
    return [weakref.ref(x) for x in leaves]


def _same(known: list[Any], tree: Tree) -> bool:
    leaves = jax.tree.leaves(tree)
    return len(known) == len(leaves) > 0 and all(
        reference() is leaf for reference, leaf in zip(known, leaves, strict=True)
    )

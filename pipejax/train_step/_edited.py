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
class KnownPairs:
    """The pairs of the states that a train step has returned and somebody still has.

    References are weak, so that no array is kept alive.
    """

    _pairs: list[tuple[list[Any], list[Any]]] = dataclasses.field(default_factory=list)

    def remember(self, state: PipelineState) -> PipelineState:
        """Returns the state, whose pairs are known from now on."""
        pairs = [*_pairs_of(state)]
        new = [(_weak(x.part), _weak(x.copy)) for x in pairs]

        def is_old(part: list[Any], copy: list[Any]) -> bool:
            gone = not all(x() is not None for x in (*part, *copy))
            return gone or any(
                _same(part, x.part) and _same(copy, x.copy) for x in pairs
            )

        self._pairs = [pair for pair in self._pairs if not is_old(*pair)] + new
        return state

    def check(self, state: PipelineState) -> None:
        """Raises a `ValueError` if a known copy is beside another part than before."""
        for pair in _pairs_of(state):
            parts = [part for part, copy in self._pairs if _same(copy, pair.copy)]
            if parts and not any(_same(part, pair.part) for part in parts):
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

"""Phases: the parts of an all-reduce by their purpose, so that each can be timed."""

import itertools
from typing import NamedTuple

from ._stages import Link, Sent, Stage, Stages, chained


class Phase(NamedTuple):
    """A part of an all-reduce that serves one purpose; see `phases`.

    Attributes:
      name: The purpose. `"encode"`, `"reduction"` and `"decode"` are local work.
        `"first"` is a collective of the first half of the all-reduce, `"second"` a
        collective of the second half.
      run: Function that takes and returns a pair `(value, states)`.
    """

    name: str
    run: Stage


def phases(stages: Stages) -> tuple[Phase, ...]:
    """Splits an all-reduce into phases.

    The first phase takes `(summands, states)`, each other phase takes what the one
    before returned, and the last returns `(sums, states)`. Together they do the same as
    `run`. `Stages.stages` also splits an all-reduce, but by collective and not by
    purpose.

    Args:
      stages: What an algorithm returned. It has at least one collective.

    Returns:
      The phases in order. Each collective is a phase of its own. Consecutive local work
      of the same purpose is one phase.

    Raises:
      ValueError: If no stage has a collective.

    Examples:
      >>> import jax
      >>> from pipejax.collectives import Layout, phases, two_shot
      >>> def show():
      ...     stages = two_shot()(Layout.of_shapes(((8,),)), "data")
      ...     print(*(phase.name for phase in phases(stages)))
      >>> jax.vmap(show, axis_name="data", axis_size=4)()
      encode first reduction encode second decode
    """
    named = zip(_names(stages), stages.links, strict=True)
    found = []
    for (name, sends), links in itertools.groupby(
        named, key=lambda pair: (pair[0], isinstance(pair[1], Sent))
    ):
        every = [link for _, link in links]
        for part in [[link] for link in every] if sends else [every]:
            found.append(Phase(name, chained(part)))
    return tuple(found)


def _names(stages: Stages) -> list[str]:
    sent = [i for i, link in enumerate(stages.links) if isinstance(link, Sent)]
    if not sent:
        raise ValueError(
            "`stages` must have a collective, got only local work. Pass what an"
            " algorithm such as pj.collectives.psum() returns."
        )
    middle = sent[(len(sent) - 1) // 2]

    def name(i: int, link: Link) -> str:
        if isinstance(link, Sent):
            return "first" if i <= middle else "second"
        if link.encodes or i < sent[0]:
            return "encode"
        return "decode" if i > sent[-1] else "reduction"

    return [name(i, link) for i, link in enumerate(stages.links)]

"""An all-reduce by what its parts are for, so that each can be timed."""

import itertools
from typing import NamedTuple

from ._stages import Link, Sent, Stage, Stages, chained


class Phase(NamedTuple):
    """Links of an all-reduce that follow one another and serve one purpose.

    Attributes:
      name: `"encode"`, `"reduction"` or `"decode"`, which are local; `"first"` for a
        collective of the first half, `"second"` for one of the second.
      run: all of its links, `(value, states)` to the same.
    """

    name: str
    run: Stage


def phases(stages: Stages) -> tuple[Phase, ...]:
    """Splits an all-reduce into phases; run in order they are the all-reduce.

    Args:
      stages: what an algorithm returned; at least one of its links is a collective.
    """
    named = zip(_names(stages), stages.links, strict=True)
    found = []
    for (name, sends), links in itertools.groupby(
        named, key=lambda pair: (pair[0], isinstance(pair[1], Sent))
    ):
        together = [link for _, link in links]
        for part in [[link] for link in together] if sends else [together]:
            found.append(Phase(name, chained(part)))
    return tuple(found)


def _names(stages: Stages) -> list[str]:
    """Returns the phase of each link."""
    sent = [i for i, link in enumerate(stages.links) if isinstance(link, Sent)]
    middle = sent[(len(sent) - 1) // 2]

    def name(i: int, link: Link) -> str:
        if isinstance(link, Sent):
            return "first" if i <= middle else "second"
        if link.encodes or i < sent[0]:
            return "encode"
        return "decode" if i > sent[-1] else "reduction"

    return [name(i, link) for i, link in enumerate(stages.links)]

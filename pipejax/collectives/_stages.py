"""An all-reduce as a sequence of stages.

A stage is local work, then one collective. What is local at the end is its finish.

- `psum`: one stage, nothing local
- two-shot: encode, all_to_all | decode and sum, encode, all_gather | decode
- ring: 2(p-1) stages, each encode, ppermute

Whoever runs it may put compute between the stages, and so hide each of them: a chain of
dependent collectives in one place hides only its last link.

Algorithms are written as links, `Local` or `Sent`, and put together by `+`: an
all-reduce is a reduce-scatter and an all-gather.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._layout import Summands
from ._wire import Transfer

# What codecs keep from one vector to the next, by the name of the place of each.
States = dict[str, Any]
Stage = Callable[[tuple[Any, States]], tuple[Any, States]]


class Local(NamedTuple):
    """Work without a collective, `(value, states)` to the same.

    Attributes:
      run: it.
      encodes: whether it makes what is sent next, and does nothing else.
    """

    run: Callable[[Any, States], tuple[Any, States]]
    encodes: bool = False


class Sent(NamedTuple):
    """A collective, value to value, and what it moves.

    Attributes:
      run: it.
      transfers: one, or one for each dtype where it sums arrays of several.
    """

    run: Callable[[Any], Any]
    transfers: tuple[Transfer, ...]


Link = Local | Sent


@dataclasses.dataclass(frozen=True)
class Stages:
    """The sum of arrays over an axis, to be run in order.

    Attributes:
      links: what happens to `(summands, states)` until they are `(sums, states)`, the
        same bits on every device.
      inits: what makes the states before the first sum, each under names of its own.
    """

    links: tuple[Link, ...]
    inits: tuple[Callable[[], States], ...] = ()

    def __add__(self, other: "Stages") -> "Stages":
        return Stages(self.links + other.links, self.inits + other.inits)

    def init(self) -> States:
        """The codecs' states before the first sum: each device's own, no scalars."""
        return {name: x for init in self.inits for name, x in init().items()}

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What each collective moves, in order."""
        sent = (link for link in self.links if isinstance(link, Sent))
        return tuple(transfer for link in sent for transfer in link.transfers)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Each takes what the one before returned, the first `(summands, states)`."""
        return tuple(chained(links) for links in self._groups()[:-1])

    @property
    def finish(self) -> Stage:
        """From what the last returned to `(sums, states)`."""
        return chained(self._groups()[-1])

    def _groups(self) -> list[list[Link]]:
        """The links, a new group after each collective."""
        groups: list[list[Link]] = [[]]
        for link in self.links:
            groups[-1].append(link)
            if isinstance(link, Sent):
                groups.append([])
        return groups


def chained(links: Sequence[Link]) -> Stage:
    """Links in order, as one."""

    def stage(carry: tuple[Any, States]) -> tuple[Any, States]:
        value, states = carry
        for link in links:
            if isinstance(link, Sent):
                value = link.run(value)
            else:
                value, states = link.run(value, states)
        return value, states

    return stage


def local(function: Callable[[Any], Any]) -> Stages:
    """Work on the value alone."""
    return Stages((Local(lambda value, states: (function(value), states)),))


def renamed(stages: Stages, prefix: str) -> Stages:
    """The same with other names for its states, to stand beside its like."""

    def own(link: Link) -> Link:
        if isinstance(link, Sent):
            return link

        def run(value: Any, states: States) -> tuple[Any, States]:
            mine = {
                name.removeprefix(prefix): x
                for name, x in states.items()
                if name.startswith(prefix)
            }
            value, mine = link.run(value, mine)
            return value, states | {prefix + name: x for name, x in mine.items()}

        return link._replace(run=run)

    def init() -> States:
        return {prefix + name: x for name, x in stages.init().items()}

    return Stages(tuple(map(own, stages.links)), (init,))


def run(
    stages: Stages, summands: Summands, states: States | None = None
) -> tuple[Summands, States]:
    """Runs all stages, with nothing between them.

    Args:
      stages: what an algorithm made for arrays of this layout.
      summands: this device's own.
      states: what `stages.init()` or the call before returned; `None` begins anew.

    Returns:
      The sums, and the states for the next summands.
    """
    carry: Any = summands, stages.init() if states is None else states
    for stage in (*stages.stages, stages.finish):
        carry = stage(carry)
    return carry

"""A program: its own training loop, and the one that is converted to pipejax."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class History(NamedTuple):
    """The values by which two runs are compared.

    Attributes:
      params: The parameters after every step and, at width 2, after the drain.
      reported: The loss of every batch, and the metrics.
    """

    params: list[Any]
    reported: list[Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program in three loops: its own, one by hand, and the converted one.

    Attributes:
      params: The parameters at the start.
      original: Trains with the step of the program, from given parameters.
      delayed: Trains with the gradients of the program, of which each is applied one
        step late.
      converted: Trains with pipejax, at the width that is given in second place.
    """

    params: Any
    original: Callable[[Any], History]
    delayed: Callable[[Any], History]
    converted: Callable[[Any, int], History]


class Conversion(NamedTuple):
    """The lines and the losses of a conversion, in words.

    Attributes:
      changed: What each line does that a user adds or changes in the loss and the loop.
      around: The same for logs, evaluation and checkpoints. Lines that only go away, or
        are indented anew, do not count.
      dropped: What the conversion loses.
      keys: Where the random numbers come from that both loops draw.
    """

    changed: tuple[str, ...]
    around: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    keys: str = "none"

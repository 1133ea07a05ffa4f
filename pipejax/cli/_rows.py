"""The rows of a ranking of ways to train: which to print, and which to recommend."""

from collections.abc import Collection, Mapping

from pipejax import timing
from pipejax.codecs import Codec

from ._usage import UsageError

GAIN = (
    "The gain is how many times as fast a way is as D-Sync, which sends all bits after"
    " compute. In brackets, D-Sync sends them during the backward pass, as well as is"
    " possible."
)
"""Explains the gains of a row."""


def chosen(
    ranked: list[timing.RankedConfig], row: int | None = None
) -> timing.RankedConfig:
    """Returns the choice in a row, for a train step of `pj.make_train_step`."""
    if row is None:
        # `pj.make_train_step` has no buckets.
        return next(choice for choice in ranked if choice.config.buckets == 1)
    if not 1 <= row <= len(ranked):
        raise UsageError(
            f"`--row` must be one of the rows 1 to {len(ranked)}, got {row}. --top"
            f" {len(ranked)} prints all of them"
        )
    choice = ranked[row - 1]
    if choice.config.buckets > 1:
        raise UsageError(
            "`--row` must be a way in one bucket, because pj.make_train_step has no"
            f" buckets; got {row}, {choice.config}. Write this step yourself, with an"
            " all-reduce for each bucket"
        )
    return choice


def exact(ranked: list[timing.RankedConfig]) -> timing.RankedConfig:
    return next(
        choice
        for choice in ranked
        if choice.config.width > 1 and choice.config.codec is None
    )


def d_sync(ranked: list[timing.RankedConfig]) -> timing.RankedConfig:
    """Returns the way that gains are relative to; see `GAIN`."""
    waits = [
        choice
        for choice in synchronous(ranked)
        if choice.config.codec is None and choice.config.buckets == 1
    ]
    return min(waits, key=lambda choice: choice.step)


def synchronous(ranked: list[timing.RankedConfig]) -> list[timing.RankedConfig]:
    """Returns the ways that exchange every gradient, and wait for it."""
    return [
        choice
        for choice in ranked
        if choice.config.width == 1 and not choice.config.sync_every
    ]


def in_rounds(
    ranked: list[timing.RankedConfig],
    known: Mapping[str, Codec],
    compute: timing.Compute,
    *,
    one_core: bool,
) -> list[timing.RankedConfig]:
    """Returns the ways with local steps, whose codecs compress vectors."""
    whole = {name for name, codec in known.items() if codec.needs_leaves}
    vectors = [choice for choice in ranked if choice.config.codec not in whole]
    return timing.local_steps(vectors, compute, one_core=one_core)


def number(ranked: list[timing.RankedConfig], choice: timing.RankedConfig) -> int:
    return 1 + ranked.index(choice)


def lines(
    ranked: list[timing.RankedConfig], top: int, also: Collection[timing.RankedConfig]
) -> list[str]:
    """Returns the first rows as text with their numbers, and those of other choices."""
    shown = {*ranked[:top], *also}
    return [
        f"{row:>3}  {choice}" for row, choice in enumerate(ranked, 1) if choice in shown
    ]

"""The rows of a ranking of ways to train: which to print, and which to recommend."""

from collections.abc import Collection, Iterable, Mapping

from pipejax import timing
from pipejax.codecs import Codec

from ._candidates import is_measured
from ._usage import UsageError

NOT_MEASURED = "accuracy not measured"
"""The last words of a row with a codec that nobody has trained with in this way."""


def gain(baseline: str = "float32") -> str:
    """Explains the gains of a row, over D-Sync with gradients of this dtype."""
    return (
        "The gain is how many times as fast a setup is as D-Sync, which exchanges"
        f" {baseline} gradients after compute. In brackets, D-Sync exchanges them"
        " during the backward pass, at best."
    )


def said(choice: timing.RankedConfig) -> str:
    """Returns a row, with a note if its accuracy has not been measured."""
    if is_measured(choice.config):
        return str(choice)
    return f"{choice}; {NOT_MEASURED}"


def about_accuracy(choices: Iterable[timing.RankedConfig]) -> list[str]:
    """Explains the note of `said`, if one of the choices has it."""
    if all(is_measured(choice.config) for choice in choices):
        return []
    return [
        f"{NOT_MEASURED.capitalize()}: this codec has not been compared"
        " with synchronous training in such a step. Compare a short run with one of"
        " width 1."
    ]


def about_delay(ranked: list[timing.RankedConfig]) -> list[str]:
    """Says what to do if a synchronous step in buckets is as fast as any."""
    if ranked[0].config.width > 1 or ranked[0].config.buckets == 1:
        return []
    return [
        "Row 1 needs no delay: try width=1 first. On accelerators, XLA then starts sums"
        " during the backward pass."
    ]


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
    """Returns D-Sync in float32, uncompressed; see `gain`."""
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
        f"{row:>3}  {said(choice)}"
        for row, choice in enumerate(ranked, 1)
        if choice in shown
    ]

"""Says in words what `pipejax plan` has found, below its table."""

import argparse
import math
from collections.abc import Callable

from pipejax import timing

from ._rows import about_accuracy, about_delay, d_sync, exact, gain, number


def summary(
    ranked: list[timing.RankedConfig],
    choice: timing.RankedConfig,
    own: Callable[[timing.RankedConfig], timing.Compute],
    args: argparse.Namespace,
) -> list[str]:
    """Describes what gains are relative to, and what pipelining alone can gain.

    `own` returns the compute times of a step of a way.
    """
    halves = args.shard_optimizer and not args.one_core
    most = timing.ceilings(own(choice), choice.exchange, shard_optimizer=halves)
    plain = exact(ranked)
    piped = (each for each in (choice, plain) if each.config.width > 1)
    rows = [number(ranked, each) for each in (d_sync(ranked), plain, choice)]
    return [
        f"{gain(args.baseline)} Row {rows[0]} is D-Sync in float32, and row"
        f" {rows[1]} is the best pipelined setup that is uncompressed.",
        *about_accuracy((*ranked[: args.top], choice)),
        *about_delay(ranked),
        f"With the exchange of row {rows[2]}, pipelining alone is at most"
        f" {most['synchronous']:.2f} times as fast as a synchronous step, and"
        f" {most['overlapped']:.2f} times as fast as one that overlaps its exchange"
        " with the backward pass.",
        *(_hidden(each, own(each), args) for each in dict.fromkeys(piped)),
        *_rounds(choice, plain),
        *_least_delay(rows[2], choice, own(choice), args),
    ]


def _rounds(choice: timing.RankedConfig, plain: timing.RankedConfig) -> list[str]:
    """Says what the rounds of a choice cost, and whether they are needed."""
    every, overlap = choice.config.sync_every, choice.config.overlap_steps
    if not every:
        return []
    if plain.step <= choice.step:
        return ["A pipeline hides it uncompressed, without local steps and their cost."]
    hidden = f"beside {overlap} of these steps" if overlap else "and wait for it"
    return [
        f"Hosts train alone, and exchange all parameters once in {every} steps,"
        f" {hidden}. The longer a round, the more accuracy it costs"
        " (docs/local_steps.md)."
    ]


def _least_delay(
    row: int,
    choice: timing.RankedConfig,
    compute: timing.Compute,
    args: argparse.Namespace,
) -> list[str]:
    """Says how much of the exchange of a choice needs its delay to be hidden."""
    share = timing.least_delayed_share(compute, choice.exchange)
    percent = math.ceil(100 * share - 1e-9)  # a rounding error must not add one
    # The host executor, which CPUs have, exchanges nothing beside a backward pass.
    never = choice.config.width == 1 or args.shard_optimizer or args.one_core
    if never or percent in (0, 100):
        return []
    return [
        f"The exchange of row {row} is also hidden if only the {percent}% of its bytes"
        " whose gradients are computed last are delayed (`delayed=`)."
        " pj.overlap.least_delay names the arrays."
    ]


def _hidden(
    choice: timing.RankedConfig, compute: timing.Compute, args: argparse.Namespace
) -> str:
    """Says from which batch size on the exchange of a choice is hidden."""
    times = timing.batch_to_hide(
        compute,
        choice.exchange,
        choice.config.width,
        one_core=args.one_core,
        shard_optimizer=args.shard_optimizer,
    )
    sizes = f"from {max(times, 0.01):.2f} times this batch size on"
    if not times:
        sizes = "with any batch size"
    elif math.isinf(times):
        sizes = "with no batch size, because the passes take no time"
    elif args.batch is not None:
        whose = "host" if args.sharded or args.local_steps else "device"
        sizes += f", {math.ceil(args.batch * times):,} examples a {whose}"
    return f"The exchange of {choice.config} is hidden {sizes}."

"""Reads the newest snapshot that all processes of a job can read."""

import logging
from collections.abc import Callable
from typing import TypeVar

import jax
from etils import epath

from .._extras import filled
from .._gather import gathered
from .._meta import check_version
from .._read import Choose, Saved, solid, with_empty, written
from . import _blocks
from ._catalogue import Source, sources, without
from ._keeper import Keeper

_log = logging.getLogger("pipejax")
T = TypeVar("T")


def from_memory(
    keeper: Keeper, choose: Choose, wants: Callable[[int], bool]
) -> Saved | None:
    """Returns the newest snapshot of a step that is wanted, or `None` without one.

    The snapshot under way is waited for. A damaged file is left out, on all processes
    alike, and a snapshot of other devices too. Raises a `ValueError` if a train step
    cannot continue from the snapshot.
    """
    keeper.list_own()
    damaged: set[Source] = set()
    while True:
        moments = sources(without(keeper.memory.catalogue, damaged))
        # An earlier attempt may have gone on from what a later one has left.
        latest = max((x.attempt for x in moments), default=0)
        found = (x for x in moments if x.attempt == latest and wants(x.step))
        chosen = max(found, default=None)
        if chosen is None:
            return None
        read = _read(keeper, choose, moments[chosen][keeper.memory.rank])
        if isinstance(read, Saved):
            keeper.keep(chosen)
            _log.info("restored step %d from %s", chosen.step, keeper.memory.path)
            return read
        if not read:
            _log.warning(
                "the snapshot of step %d in %s is of other devices, and is left out",
                *(chosen.step, keeper.memory.path),
            )
            read = {source for each in moments[chosen] for source in each}
        damaged |= read


def _read(keeper: Keeper, choose: Choose, own: list[Source]) -> Saved | set[Source]:
    """Reads the part of this process; or returns files that are damaged, if any."""
    opened = _everywhere(lambda: keeper.memory.read(own), own)
    if isinstance(opened, set):
        return opened
    header, contents = opened
    place = epath.Path(keeper.memory.path)
    check_version(place, header.meta)
    wanted = choose(place, header.meta)
    shapes = written(wanted)
    blocks = _blocks.wanted(solid(shapes))
    read = _everywhere(lambda: contents(blocks), own)
    if isinstance(read, set):
        return read
    if not all(gathered(blocks <= read.keys())):
        return set()
    arrays = jax.block_until_ready(_blocks.assembled(solid(shapes), read))
    extras = filled(header.extras, header.own)
    return Saved(with_empty(shapes, arrays), extras, header.meta, wanted)


def _everywhere(action: Callable[[], T], own: list[Source]) -> T | set[Source]:
    """Returns the result of an action, or the files for which it failed anywhere."""
    failed, result = "", None
    try:
        result = action()
    except (OSError, ValueError, EOFError, LookupError) as error:
        failed = f"{type(error).__name__}: {error}"
    every = gathered([failed, own])
    for rank, (text, _) in enumerate(every):
        if text and jax.process_index() == 0:
            _log.warning("a snapshot cannot be read: %s (process %d)", text, rank)
    if any(text for text, _ in every):
        return {Source(*source) for text, files in every if text for source in files}
    assert result is not None
    return result

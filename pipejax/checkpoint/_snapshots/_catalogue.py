"""Which steps the hosts of a job have in memory, and where each process reads one."""

import pathlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .._fault import DamagedError
from .._meta import digest
from ._file import Header, names, read_header


class Kept(NamedTuple):
    """A file, as a process lists it.

    Attributes:
      name: The name of the file.
      attempt: How often the job had been started when it was written.
      step: The step of the state.
      rank: The process whose blocks it has.
      processes: The number of processes of the job.
      rest: The process whose part has the rest of the blocks; -1 if there is no rest.
      state: The digest of what must be the same in the files of all processes.
    """

    name: str
    attempt: int
    step: int
    rank: int
    processes: int
    rest: int
    state: str


class Source(NamedTuple):
    """A file, and a process on its host."""

    process: int
    name: str


class Moment(NamedTuple):
    """A step of an attempt. A later attempt counts more than a later step."""

    attempt: int
    step: int


Catalogue = Sequence[Sequence[Kept]]
"""The files that each process lists, by rank."""


def listed(folder: pathlib.Path) -> list[Kept]:
    """Lists the whole files of a folder."""
    found = []
    for name in names(folder):
        try:
            found.append(_kept(name, read_header(folder / name)))
        except DamagedError:  # it is being written, or was broken off
            continue
    return found


def sources(catalogue: Catalogue) -> dict[Moment, list[list[Source]]]:
    """Returns each moment that all processes can read, and where each reads it.

    A process reads its part from its own host, or else from another, or else a copy of
    it and the part that has the rest.
    """
    here: dict[tuple[Moment, str], dict[int, list[Source]]]
    here = defaultdict(lambda: defaultdict(list))
    copies: dict[tuple[Moment, str], dict[int, list[tuple[Source, int]]]]
    copies = defaultdict(lambda: defaultdict(list))
    for process, files in enumerate(catalogue):
        for file in files:
            if file.processes != len(catalogue):
                continue
            key = Moment(file.attempt, file.step), file.state
            source = Source(process, file.name)
            if file.rest < 0:
                here[key][file.rank].append(source)
            else:
                copies[key][file.rank].append((source, file.rest))
    found = {}
    for key in here:
        every = [
            _of_rank(rank, here[key], copies[key]) for rank in range(len(catalogue))
        ]
        if all(every):
            found[key[0]] = every
    return found


def without(catalogue: Catalogue, damaged: set[Source]) -> Catalogue:
    """Returns a catalogue without some files."""
    return [
        [file for file in files if Source(process, file.name) not in damaged]
        for process, files in enumerate(catalogue)
    ]


def _kept(name: str, header: Header) -> Kept:
    state = digest([header.meta, header.extras])
    return Kept(
        name,
        header.attempt,
        header.step,
        header.rank,
        header.processes,
        header.rest,
        state,
    )


def _of_rank(
    rank: int,
    parts: dict[int, list[Source]],
    copies: dict[int, list[tuple[Source, int]]],
) -> list[Source]:
    """Returns the files from which a process reads its blocks, empty if it cannot."""
    if own := parts.get(rank):
        return [_nearest(own, rank)]
    for copy, rest in copies.get(rank, ()):
        if there := parts.get(rest):
            return [copy, _nearest(there, rank)]
    return []


def _nearest(sources: Sequence[Source], rank: int) -> Source:
    return min(sources, key=lambda source: (source.process != rank, source))

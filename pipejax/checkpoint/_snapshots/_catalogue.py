"""Which steps the hosts of a job have in memory, and where each process reads one."""

import pathlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._fault import DamagedError
from ._file import Label, Moment, names, read_header


class Kept(NamedTuple):
    """A file, as a process lists it.

    Attributes:
      name: The name of the file.
      label: The state and the process that it belongs to.
      state: The digest of what must be the same in the files of all processes.
    """

    name: str
    label: Label
    state: str

    @classmethod
    def of_json(cls, values: list[Any]) -> "Kept":
        name, label, state = values
        return cls(name, Label(*label), state)


class Source(NamedTuple):
    """A file, and a process on its host."""

    process: int
    name: str


Catalogue = Sequence[Sequence[Kept]]
"""The files that each process lists, by rank."""

_Key = tuple[Moment, str, str]
"""The moment, the form of the state and the opening: the same in all parts."""


def listed(folder: pathlib.Path) -> list[Kept]:
    """Lists the whole files of a folder."""
    found = []
    for name in names(folder):
        try:
            header = read_header(folder / name)
        except DamagedError:  # it is being written, or was broken off
            continue
        found.append(Kept(name, header.label, header.state))
    return found


def sources(catalogue: Catalogue) -> dict[Moment, list[list[Source]]]:
    """Returns each moment that all processes can read, and where each reads it.

    A process reads its part from its own host, or else from another, or else a copy of
    it and the part that has the rest.
    """
    here: dict[_Key, dict[int, list[Source]]]
    here = defaultdict(lambda: defaultdict(list))
    copies: dict[_Key, dict[int, list[tuple[Source, int]]]]
    copies = defaultdict(lambda: defaultdict(list))
    for process, files in enumerate(catalogue):
        for file in files:
            label, source = file.label, Source(process, file.name)
            key = label.moment, file.state, label.opening
            if label.processes != len(catalogue):
                continue
            if label.rest < 0:
                here[key][label.rank].append(source)
            else:
                copies[key][label.rank].append((source, label.rest))
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

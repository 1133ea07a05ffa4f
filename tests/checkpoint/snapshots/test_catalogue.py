"""Tests which snapshots count, and where each process reads its part."""

import json

from pipejax.checkpoint._snapshots._catalogue import (
    Kept,
    Source,
    listed,
    sources,
    without,
)
from pipejax.checkpoint._snapshots._file import Label, Moment

from .helpers import header, write


def part(rank, step=5, *, attempt=1, processes=2, state="s", slot=0):
    return Kept(f"part-{rank}-{slot}", Label(attempt, step, rank, processes), state)


def copy(rank, rest, step=5, *, attempt=1, processes=2, state="s"):
    return Kept(f"copy-{rank}-0", Label(attempt, step, rank, processes, rest), state)


def test_snapshot_of_all_processes_counts():
    assert sources([[part(0)], []]) == {}
    found = sources([[part(0)], [part(1)]])
    assert found == {Moment(1, 5): [[Source(0, "part-0-0")], [Source(1, "part-1-0")]]}


def test_process_without_memory_reads_the_copy_and_the_rest():
    found = sources([[part(0), copy(1, rest=0)], []])
    assert found[Moment(1, 5)][1] == [Source(0, "copy-1-0"), Source(0, "part-0-0")]


def test_copy_without_its_rest_does_not_count():
    assert sources([[part(0), copy(1, rest=2)], [], [part(2, step=4)]]) == {}


def test_process_reads_its_own_host_first():
    """Both processes are on one host, which lists the files of both."""
    both = [part(0), part(1)]
    found = sources([both, both])[Moment(1, 5)]
    assert found == [[Source(0, "part-0-0")], [Source(1, "part-1-0")]]


def test_moved_process_reads_another_host():
    found = sources([[part(1)], [part(0)]])[Moment(1, 5)]
    assert found == [[Source(1, "part-0-0")], [Source(0, "part-1-0")]]


def test_parts_of_different_states_do_not_mix():
    assert sources([[part(0)], [part(1, state="t")]]) == {}
    assert sources([[part(0)], [part(1, attempt=2)]]) == {}
    assert sources([[part(0, processes=3)], [part(1, processes=3)]]) == {}


def test_later_attempt_counts_more_than_later_step():
    files = [part(0, 9), part(0, 5, attempt=2, slot=1)]
    others = [part(1, 9), part(1, 5, attempt=2, slot=1)]
    assert max(sources([files, others])) == Moment(2, 5)


def test_damaged_file_is_left_out():
    catalogue = [[part(0)], [part(1)]]
    assert without(catalogue, {Source(1, "part-1-0")}) == [[part(0)], []]
    assert without(catalogue, {Source(0, "part-1-0")}) == catalogue


def test_whole_files_of_a_folder_are_listed(tmp_path):
    write(tmp_path / "part-0-0", header(step=3))
    write(tmp_path / "copy-1-1", header(step=4, rank=1, rest=0, processes=2))
    write(tmp_path / "part-0-1", header(step=5))
    (tmp_path / "part-0-1.json").write_text("{")
    found = listed(tmp_path)
    assert [(x.name, x.label) for x in found] == [
        ("copy-1-1", Label(1, 4, 1, 2, 0)),
        ("part-0-0", Label(1, 3, 0, 1)),
    ]
    assert [Kept.of_json(json.loads(json.dumps(x))) for x in found] == found

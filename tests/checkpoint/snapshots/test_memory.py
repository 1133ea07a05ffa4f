"""Tests the memory of a job of one process; several are in another file."""

import numpy as np
import pytest

from pipejax.checkpoint._fault import DamagedError
from pipejax.checkpoint._snapshots import _memory
from pipejax.checkpoint._snapshots._catalogue import Source
from pipejax.checkpoint._snapshots._memory import Memory

from .helpers import CONTENTS, header, write


@pytest.fixture
def memory(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "memory").mkdir()
    return lambda: Memory(tmp_path / "memory", str(tmp_path / "run"))


def test_files_of_earlier_attempts_are_listed_and_read(memory):
    first = memory()
    assert (first.attempt, first.catalogue, first.holders) == (1, [[]], [None])
    write(first.path / "part-0-0", header(step=7, attempt=first.attempt))
    first.close(remove=False)
    again = memory()
    assert (again.attempt, again.path) == (2, first.path)
    assert [file.label.step for file in again.catalogue[0]] == [7]
    found, contents = again.read([Source(0, "part-0-0")])
    assert found.label.step == 7
    some = {*CONTENTS} - {next(iter(CONTENTS))}
    read = contents(some)
    assert read.keys() == some
    assert all(np.array_equal(read[x], CONTENTS[x]) for x in some)
    again.close(remove=True)
    assert not again.path.exists()


def test_missing_file_cannot_be_opened(memory):
    opened = memory()
    with pytest.raises(DamagedError, match="the header of part-0-1"):
        opened.read([Source(0, "part-0-1")])
    opened.close(remove=True)


def test_files_of_moved_ranks_are_removed(memory):
    opened = memory()
    for name in ("part-0-0", "part-0-1", "part-2-0", "copy-1-1"):
        write(opened.path / name, header(step=7, attempt=1))
    opened.remove_moved()
    left = sorted(path.name for path in opened.path.iterdir())
    kept = [f"part-0-{slot}.{kind}" for slot in (0, 1) for kind in ("data", "json")]
    assert left == ["lock-0", *kept]
    opened.close(remove=True)


def test_process_on_the_loopback_is_reached_at_another_address(monkeypatch):
    """The name of the coordinator may stand for the loopback on its own host."""
    memory = object.__new__(Memory)
    memory.rank, memory._hosts = 0, ["first", "second"]
    addresses = [("127.0.1.1", 5), ("10.0.0.2", 6)]
    asked = {"10.0.0.2:6": "10.0.0.1"}
    monkeypatch.setattr(_memory._peers, "own_address", asked.__getitem__)
    monkeypatch.setattr(_memory, "gathered", lambda mine: [mine, addresses[1]])
    assert memory._reachable(addresses) == [("10.0.0.1", 5), ("10.0.0.2", 6)]
    memory._hosts = ["first", "first"]
    assert memory._reachable(addresses) == addresses

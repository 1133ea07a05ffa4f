"""Tests that files return what was written, and that damage to them shows."""

import json
import os

import numpy as np
import pytest

from pipejax.checkpoint._fault import DamagedError
from pipejax.checkpoint._snapshots import _file

from .helpers import CONTENTS, header, write


def read(path):
    found = _file.read_header(path)
    contents = _file.read(path, found, found.offsets)
    return found, {x: _file.checked(found, x, content) for x, content in contents}


def test_written_file_is_read_again(tmp_path):
    path = tmp_path / "part-0-0"
    full = write(path, header(extras={"position": [1, "a"]}))
    found, contents = read(path)
    assert found == full
    assert contents.keys() == CONTENTS.keys()
    for block, content in contents.items():
        assert content.shape == block.shape
        assert np.array_equal(content, CONTENTS[block].reshape(block.shape))


def test_file_without_header_is_none(tmp_path):
    path = tmp_path / "part-0-0"
    write(path, header())
    assert _file.names(tmp_path) == ["part-0-0"]
    _file.withdraw(path)
    assert _file.names(tmp_path) == []
    with pytest.raises(DamagedError, match=r"the header of part-0-0: .*No such file"):
        _file.read_header(path)


@pytest.mark.parametrize("place", [0, 24, 64, 130])
def test_changed_byte_of_the_data_shows(tmp_path, place):
    path = tmp_path / "part-0-0"
    write(path, header())
    inside = place != 24  # a byte between two blocks
    with path.with_suffix(".data").open("r+b") as file:
        file.seek(place)
        before = file.read(1)
        file.seek(place)
        file.write(bytes([before[0] ^ 1]))
    if inside:
        with pytest.raises(DamagedError, match="of process 0 is not what was written"):
            read(path)
    else:
        read(path)


def test_changed_header_shows(tmp_path):
    path = tmp_path / "part-0-0"
    write(path, header())
    file = path.with_suffix(".json")
    file.write_text(file.read_text().replace("[1, 3, 0,", "[1, 4, 0,"))
    with pytest.raises(DamagedError, match="is not what was written"):
        _file.read_header(path)
    file.write_text("{")
    with pytest.raises(DamagedError, match="the header of part-0-0"):
        _file.read_header(path)


def test_shortened_data_shows(tmp_path):
    path = tmp_path / "part-0-0"
    write(path, header())
    os.truncate(path.with_suffix(".data"), 70)
    with pytest.raises(EOFError, match="the end came after"):
        read(path)


def test_data_without_room_is_refused_unwritten(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        _file.reserve(tmp_path / "part-0-0", 100)


@pytest.mark.parametrize(("tmpfs", "room"), [(True, 99), (True, None), (False, 99)])
def test_memory_beyond_the_limit_of_the_job_is_refused(
    tmp_path, monkeypatch, tmpfs, room
):
    monkeypatch.setattr(_file.memory_limit, "in_memory", lambda _: tmpfs)
    monkeypatch.setattr(_file.memory_limit, "left", lambda: room)
    path = tmp_path / "part-0-0"
    if tmpfs and room is not None:
        with pytest.raises(OSError, match="the limit of this job's memory leaves"):
            _file.reserve(path, 100)
        assert not path.with_suffix(".data").stat().st_size
    else:
        assert len(_file.reserve(path, 100)) == 100
    # A file that is there needs no more.
    path.with_suffix(".data").write_bytes(bytes(100))
    assert len(_file.reserve(path, 100)) == 100


def test_data_is_private(tmp_path):
    path = tmp_path / "part-0-0"
    write(path, header())
    assert path.with_suffix(".data").stat().st_mode & 0o777 == 0o600


def test_header_of_another_version_is_damage(tmp_path):
    path = tmp_path / "part-0-0"
    write(path, header())
    beside = path.with_suffix(".json")
    line = json.loads(beside.read_text())
    text = json.dumps(json.loads(line["content"]) | {"newer": 1})
    digest = _file._digest(text)
    beside.write_text(json.dumps({"digest": digest, "content": text}))
    with pytest.raises(DamagedError, match=r"the header of part-0-0: .*newer"):
        read(path)

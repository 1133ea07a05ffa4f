"""Tests that files reach those who know the secret, and nobody else."""

import contextlib
import socket

import numpy as np
import pytest

from pipejax.checkpoint._snapshots import _file, _peers
from pipejax.checkpoint._snapshots._peers import Server, opened, own_address

from .helpers import CONTENTS, header, write

SECRET = b"secret"


@pytest.fixture
def address(tmp_path):
    with contextlib.closing(Server(tmp_path, SECRET)) as server:
        yield "127.0.0.1", server.port


def test_blocks_of_a_file_are_sent(tmp_path, address):
    full = write(tmp_path / "part-0-0", header())
    with opened(address, SECRET, "part-0-0") as (found, read):
        assert found == full
        some = [*CONTENTS][1:]
        contents = {x: _file.checked(found, x, content) for x, content in read(some)}
    assert [*contents] == some
    assert all(np.array_equal(contents[x], CONTENTS[x]) for x in some)


def test_reader_without_the_secret_gets_nothing(tmp_path, address):
    write(tmp_path / "part-0-0", header())
    refused = pytest.raises(EOFError, match="the connection has ended")
    with refused, opened(address, b"guessed", "part-0-0"):
        pass


def test_keeper_without_the_secret_is_refused(address, tmp_path):
    with contextlib.closing(Server(tmp_path, b"")) as other:
        where = ("127.0.0.1", other.port)
        refused = pytest.raises((ValueError, EOFError))
        with refused, opened(where, SECRET, "part-0-0"):
            pass


@pytest.mark.parametrize("name", ["part-0-1", "../part-0-0", "/etc/passwd", ""])
def test_other_files_are_not_sent(tmp_path, address, name):
    (tmp_path.parent / "part-0-0.json").write_text("{}")
    refused = pytest.raises(EOFError, match="the connection has ended")
    with refused, opened(address, SECRET, name):
        pass


def test_server_goes_on_after_a_stranger(tmp_path, address):
    write(tmp_path / "part-0-0", header())
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n\n" * 100)
    with opened(address, SECRET, "part-0-0") as (found, _):
        assert found.label.step == 3


def test_closed_server_accepts_nothing(tmp_path):
    server = Server(tmp_path, SECRET)
    server.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), 1.0)


def test_silent_keeper_is_given_up(monkeypatch):
    monkeypatch.setattr(_peers, "_PATIENCE", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TimeoutError),
        opened(silent.getsockname(), SECRET, "part-0-0"),
    ):
        pass


def test_own_address_lies_on_the_way_to_process_0():
    assert own_address(None) == "127.0.0.1"
    assert own_address("127.0.0.1:1234") == "127.0.0.1"
    assert own_address("[::1]:1234") in ("::1", socket.gethostname())

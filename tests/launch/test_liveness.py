"""Tests that a process notices the end of another one by its closed connection."""

import errno
import socket
import subprocess
import sys
import time

import pytest

from pipejax import launch
from pipejax.launch import _liveness, _roll_call

from .helpers import record


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    found = {}
    monkeypatch.setattr(_liveness, "_kept", found)
    monkeypatch.setattr(_liveness, "_said", {})
    monkeypatch.setattr(_liveness, "_closed", set())
    yield found
    for connection in found.values():
        connection.close()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_closed_connections_are_reported_by_rank():
    (first, second), (third, fourth) = socket.socketpair(), socket.socketpair()
    _liveness.keep({1: first, 5: third})
    assert _liveness.closed() == set()
    second.close()
    until(lambda: _liveness.closed() == {1})
    fourth.close()
    until(lambda: _liveness.closed() == {1, 5})


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), ConnectionResetError(), OSError(errno.EHOSTUNREACH, "")],
)
def test_connection_lost_by_the_network_says_nothing(kept, error):
    class Lost:
        open = True

        def recv(self, size):
            raise error

        def close(self):
            self.open = False

    (first, second), lost = socket.socketpair(), Lost()
    kept[3] = lost
    _liveness.keep({1: first})
    second.close()
    until(lambda: _liveness.closed() == {1})
    assert kept.keys() == {1}
    assert not lost.open


def test_text_of_process_0_reaches_the_others(kept):
    ours, theirs = socket.socketpair()
    _liveness.keep({1: ours})
    _liveness.send("process 3 died\nat é")
    kept.clear()
    _liveness.keep({0: theirs})
    until(lambda: _liveness.closed() or _liveness.received())
    ours.close()
    until(lambda: _liveness.closed() == {0})
    assert _liveness.received() == "process 3 died\nat é"


def test_unfinished_text_is_none():
    ours, theirs = socket.socketpair()
    _liveness.keep({0: theirs})
    ours.sendall(b"process 3")
    ours.close()
    until(lambda: _liveness.closed() == {0})
    assert _liveness.received() == ""


def test_text_is_sent_beside_an_ended_process():
    (first, second), (third, fourth) = socket.socketpair(), socket.socketpair()
    _liveness.keep({1: first, 2: third})
    second.close()
    _liveness.send("text")
    assert fourth.recv(100) == b"text\0"
    assert not _liveness.all_closed()
    fourth.close()
    until(_liveness.all_closed)


def test_process_is_not_waited_for_once_cut_off():
    (first, second), (third, fourth) = socket.socketpair(), socket.socketpair()
    _liveness.keep({1: first, 2: third})
    _liveness.leave_out({2})
    with fourth:
        assert not _liveness.all_closed()
        second.close()
        until(_liveness.all_closed)


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="not on this system")
def test_idle_connections_are_probed():
    """A firewall then does not forget them: many do after some minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        _liveness.keep({1: connection})
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


REPORTS = """
import sys, time
from pipejax import launch
from pipejax.launch import _liveness, _roll_call
from tests.launch.helpers import record

place = launch.Place("arguments", f"127.0.0.1:{sys.argv[1]}", 2, 1)
meeting = _roll_call.call(place, record(1, 2), bind="", timeout=60.0)
_liveness.keep(meeting.connections)
print("has met", flush=True)
time.sleep(600)
"""


def test_process_killed_after_the_roll_call_is_noticed(port):
    """The port is free for JAX's service meanwhile."""
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-c", REPORTS, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        place = launch.Place("arguments", address, 2, 0)
        meeting = _roll_call.call(place, record(0, 2), bind=address, timeout=60.0)
        assert meeting.hosts == ["host0", "host1"]
        _liveness.keep(meeting.connections)
        with socket.create_server(("127.0.0.1", port)):
            assert _liveness.closed() == set()
        # A process killed before it has read the answer resets its connection.
        assert process.stdout.readline() == "has met\n"
        process.kill()
        until(lambda: _liveness.closed() == {1})


def test_broken_connection_takes_no_later_one_of_its_rank_along(monkeypatch):
    """A thread of an earlier job may still read when a new job begins."""

    class Broken:
        def recv(self, size):
            monkeypatch.setattr(_liveness, "_kept", {0: "of a new job"})
            raise OSError

        def close(self):
            pass

    monkeypatch.setattr(_liveness, "_kept", {0: Broken()})
    monkeypatch.setattr(_liveness, "_closed", set())
    _liveness._read(0)
    assert _liveness._kept == {0: "of a new job"}

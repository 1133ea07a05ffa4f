"""Tests that process 0 notices the end of a process by its closed connection."""

import socket
import subprocess
import sys
import time

import pytest

from pipejax.launch._board import Board
from pipejax.launch._lifeline import Lifeline, Lifelines, opened

from .helpers import Store

HOST = "127.0.0.1"


@pytest.fixture
def lines():
    found = Lifelines(4)
    yield found
    found.close()


def board(lines):
    """Returns a board on which the port of these lifelines is offered."""
    found = Board(Store())
    found.offer(lines.port)
    return found


class Asked:
    """A board that nobody may ask."""

    def offered(self):
        pytest.fail("the port is not needed")


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def held(lines, rank):
    """Opens the lifeline of a rank, which process 0 then knows."""
    line = Lifeline(HOST, rank)
    line.tend(board(lines))
    until(lambda: lines.closed() is not None and rank in lines._named)
    return line


def test_closed_lifelines_are_reported_by_rank(lines):
    first, second = held(lines, 1), held(lines, 2)
    assert lines.closed() == set()
    first.close()
    until(lambda: lines.closed() == {1})
    second.close()
    until(lambda: lines.closed() == {1, 2})


def test_killed_process_closes_its_lifeline(lines):
    program = (
        "import sys, time; from pipejax.launch._lifeline import Lifeline;"
        "line = Lifeline('127.0.0.1', 3); line._open(int(sys.argv[1]));"
        "print('open', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(lines.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"open\n"
        until(lambda: lines.closed() == set() and 3 in lines._named)
        process.kill()
        until(lambda: lines.closed() == {3})


def test_lifeline_closed_from_outside_is_opened_again(lines):
    line = held(lines, 1)
    (connection,) = lines._named[1]
    connection.shutdown(socket.SHUT_RDWR)
    until(lambda: lines.closed() == {1})

    def opened_again():
        line.tend(board(lines))
        return lines.closed() == set()

    until(opened_again)
    line.close()


def test_rank_stays_alive_with_one_of_two_connections(lines):
    """A process that has opened its lifeline again still has an old connection."""
    first, second = held(lines, 1), held(lines, 1)
    until(lambda: lines.closed() == set() and len(lines._named[1]) == 2)
    first.close()
    time.sleep(0.1)
    assert lines.closed() == set()
    second.close()
    until(lambda: lines.closed() == {1})


def test_port_is_asked_for_again_until_offered(lines):
    line, empty = Lifeline(HOST, 1), Board(Store())
    line.tend(empty)
    lines.tend(empty)  # offers it
    line.tend(empty)
    until(lambda: lines.closed() == set() and 1 in lines._named)
    line.tend(Asked())  # it is open
    line.close()


def test_lifeline_without_a_listener_is_tried_once():
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    offered = Board(Store())
    offered.offer(port)
    line = Lifeline(HOST, 1)
    line.tend(offered)
    line.tend(Asked())
    line.close()


def test_process_without_a_coordinator_host_has_no_lifeline():
    ends = opened(None, 0, 4)
    assert ends.tend(Asked()) == set()
    ends.close()


@pytest.mark.parametrize("line", [b"4\n", b"-1\n", b"GET / HTTP/1.1\r\n", b"1" * 40])
def test_strangers_are_refused_by_lifelines(lines, line):
    with socket.create_connection((HOST, lines.port)) as stranger:
        stranger.sendall(line)
        stranger.settimeout(0.01)

        def refused():
            assert lines.closed() == set()
            try:
                return stranger.recv(1) == b""
            except ConnectionResetError:
                return True
            except TimeoutError:
                return False

        until(refused)
    assert lines._named == {}


def test_oldest_unnamed_connections_are_dropped_but_no_lifeline(lines):
    """The oldest of those that say nothing are dropped, but no lifeline."""
    line = held(lines, 1)
    strangers = [socket.create_connection((HOST, lines.port)) for _ in range(100)]
    until(lambda: lines.closed() == set() and len(lines._unnamed) == 4 + 64)
    assert lines.closed() == set()
    assert len(lines._unnamed) == 4 + 64
    strangers[0].settimeout(10)
    assert strangers[0].recv(1) == b""
    for stranger in strangers:
        stranger.close()
    line.close()
    until(lambda: lines.closed() == {1})


def test_newest_connections_of_a_rank_are_kept(lines):
    strangers = [socket.create_connection((HOST, lines.port)) for _ in range(9)]
    for stranger in strangers:
        stranger.sendall(b"2\n")
    until(lambda: lines.closed() == set() and len(lines._named.get(2, ())) == 4)
    time.sleep(0.1)
    assert lines.closed() == set()
    assert len(lines._named[2]) == 4
    for stranger in strangers:
        stranger.close()
    until(lambda: lines.closed() == {2})

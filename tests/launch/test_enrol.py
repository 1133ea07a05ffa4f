"""Tests connections to process 0 from other programs, and processes that leave."""

import concurrent.futures
import contextlib
import os
import resource
import socket
import subprocess
import sys

import pytest

from .helpers import outcomes, record


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"[" * 200_000 + b"\n",
        b'{"rank": 1}\n',
        record(1).to_json().replace(b'"rank": 1', b'"rank": "1"'),
        record(1).to_json().replace(b'"abc"', b"[1]"),
        b"",
    ],
)
def test_a_stranger_disturbs_nobody(port, said):
    """A scanner of ports, for example, sends text that is not a record."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0, 2)])
        with connected(port) as stranger:
            stranger.sendall(said)
        assert outcomes(port, [record(1, 2)]) == [["host0", "host1"]]
        assert first.result() == [["host0", "host1"]]


def visit(port, said):
    """Connects, sends `said`, and disconnects."""
    with connected(port) as visitor:
        visitor.sendall(said)


def connected(port):
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))


def test_who_leaves_before_all_have_come_is_named(port):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0)], timeout=2.0)
        visit(port, record(1).to_json())
        outcomes(port, [record(2)], timeout=2.0)
        (told,) = first.result()
    assert "\n- process 1 did not come within 2 s; those that came are 0 on" in told
    assert "\n- process 1 on host1 came, and then disconnected; its own" in told


def test_who_has_left_may_come_again(port):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0)])
        visit(port, record(1).to_json())
        assert (
            outcomes(port, [record(1), record(2)]) == [["host0", "host1", "host2"]] * 2
        )
        assert first.result() == [["host0", "host1", "host2"]]


def test_the_silent_keep_nobody_waiting(port):
    """Serving these connections one after another would take minutes."""
    with (
        contextlib.ExitStack() as silent,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(outcomes, port, [record(0, 2)])
        for _ in range(50):
            silent.enter_context(connected(port))
        assert outcomes(port, [record(1, 2)]) == [["host0", "host1"]]
        assert first.result() == [["host0", "host1"]]


STRANGERS = """
import socket, sys

address = "127.0.0.1", int(sys.argv[1])
input()
connections = [socket.create_connection(address) for _ in range(40)]
print("here", flush=True)
input()
"""


def test_more_strangers_than_there_may_be_files(port):
    """Silent connections are closed, so that others can be accepted."""
    threads = concurrent.futures.ThreadPoolExecutor(2)
    with contextlib.ExitStack() as stack, threads as pool:
        strangers = subprocess.Popen(
            [sys.executable, "-c", STRANGERS, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        stack.callback(strangers.communicate)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        first = pool.submit(outcomes, port, [record(0, 2)])
        connected(port).close()
        files = len(os.listdir("/proc/self/fd")) + 12
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
        strangers.stdin.write(b"go\n")
        assert strangers.stdout.readline() == b"here\n"
        assert outcomes(port, [record(1, 2)]) == [["host0", "host1"]]
        assert first.result() == [["host0", "host1"]]

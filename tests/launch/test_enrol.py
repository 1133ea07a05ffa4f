"""Tests connections to process 0 from other programs, and processes that leave."""

import concurrent.futures
import contextlib
import os
import resource
import subprocess
import sys
import time

import pytest

from .helpers import connected, outcomes, record


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"", b"0 1\n"])
def test_stranger_disturbs_no_roll_call(port, said):
    """A scanner of ports, for example, sends text that is not a proof."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0, 2)])
        with connected(port) as stranger:
            stranger.sendall(said)
        assert outcomes(port, [record(1, 2)]) == [["host0", "host1"]]
        assert first.result() == [["host0", "host1"]]


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 200_000 + b"\n",
        b'{"rank": 1}\n',
        record(1).to_json().replace(b'"rank": 1', b'"rank": "1"'),
        record(1).to_json().replace(b'"abc"', b"[1]"),
    ],
)
def test_malformed_record_disturbs_no_roll_call(port, said):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0, 2)])
        visit(port, said)
        assert outcomes(port, [record(1, 2)]) == [["host0", "host1"]]
        assert first.result() == [["host0", "host1"]]


def visit(port, said, source="127.0.0.1", secret=b""):
    """Connects, proves the secret, sends `said`, and disconnects."""
    with connected(port, source, secret) as visitor:
        visitor.sendall(said)


def test_process_gone_before_the_end_is_named(port):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0)], timeout=4.0)
        visit(port, record(1).to_json())
        outcomes(port, [record(2)], timeout=4.0)
        (told,) = first.result()
    assert "\n- process 1 did not come within 4 s; those that came are 0 on" in told
    assert "\n- process 1 on host1 came, and then disconnected; its own" in told


def test_disconnected_process_may_come_again(port):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0)])
        visit(port, record(1).to_json())
        assert (
            outcomes(port, [record(1), record(2)]) == [["host0", "host1", "host2"]] * 2
        )
        assert first.result() == [["host0", "host1", "host2"]]


def test_silent_connections_delay_no_roll_call(port):
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


def test_strangers_beyond_the_file_limit_disturb_no_roll_call(port):
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


SECRET = b"of this job"


def test_job_with_a_secret_starts(port):
    records = [record(0), record(1), record(2)]
    assert outcomes(port, records, secret=SECRET) == [["host0", "host1", "host2"]] * 3


def test_process_with_another_secret_is_named(port):
    """Neither side says anything about the job before the other has proved itself."""
    secrets = [SECRET, SECRET, b"another"]
    records = [record(0), record(1), record(2)]
    first, second, third = outcomes(port, records, timeout=3.0, secret=secrets)
    assert "process 2 did not come within 3 s" in first
    assert second == first
    assert "process 0 has another secret: PIPEJAX_SECRET must be the same" in third


@pytest.mark.parametrize(
    "doubtful", [record(7), record(1, 4), record(-1), record(2, 10**6)]
)
def test_impossible_record_of_a_stranger_does_not_end_the_roll_call(port, doubtful):
    """The job begins when its own processes have come, without the stranger."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0)])
        with connected(port, "127.0.0.2", b"") as stranger:
            stranger.sendall(doubtful.to_json())
            time.sleep(0.2)
            hosts = ["host0", "host1", "host2"]
            assert outcomes(port, [record(1), record(2)]) == [hosts] * 2
            assert first.result() == [hosts]
            assert stranger.recv(10) == b""


def test_doubly_claimed_rank_is_an_error_only_at_the_timeout(port):
    """One of them may be a stranger; the message names both."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(outcomes, port, [record(0)], timeout=4.0)
        with connected(port, "127.0.0.2", b"") as stranger:
            stranger.sendall(record(1).to_json())
            time.sleep(0.2)  # it comes before the processes
            start = time.monotonic()
            second = pool.submit(outcomes, port, [record(1)], timeout=4.0)
            time.sleep(0.5)  # if process 2 came first, all ranks would have come
            told = outcomes(port, [record(2)], timeout=4.0) + second.result()
            assert time.monotonic() - start > 1
        assert told == [first.result()[0]] * 2
    assert "2 processes came with rank 1, from host1, host1" in told[0]


def test_long_lines_cost_no_memory(port):
    """Before its proof, a stranger may send 256 bytes; then, all together 16 MB."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0, 2)])
        with contextlib.ExitStack() as stack:
            strangers = [
                stack.enter_context(connected(port, secret=b"")) for _ in range(40)
            ]
            for stranger in strangers:
                with contextlib.suppress(OSError):  # it has been refused
                    stranger.sendall(b"[" * 2**20)
            silent = stack.enter_context(connected(port))
            silent.sendall(b"x" * 10_000)
            silent.settimeout(5.0)
            with contextlib.suppress(ConnectionResetError):
                while silent.recv(1000):
                    pass
            assert outcomes(port, [record(1, 2)]) == [["host0", "host1"]]
        assert first.result() == [["host0", "host1"]]


def test_messages_about_strangers_are_limited(port, caplog):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcomes, port, [record(0, 2)])
        for _ in range(60):
            with connected(port) as stranger:
                stranger.sendall(b"x\n")
                while stranger.recv(1000):
                    pass
        assert outcomes(port, [record(1, 2)]) == [["host0", "host1"]]
        first.result()
    assert sum("refused a connection" in text for text in caplog.messages) == 20
    assert "further strangers are refused without a message" in caplog.text

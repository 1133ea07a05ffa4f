"""Tests the roll call with threads as processes."""

import contextlib
import re
import socket
import threading

import pytest

from pipejax.launch import _roll_call

from .helpers import outcomes, record


def test_equal_processes_learn_all_hosts(port):
    hosts = ["host0", "host1", "host2"]
    assert outcomes(port, [record(2), record(0), record(1)]) == [hosts] * 3
    # The port is free again after the first roll call.
    assert outcomes(port, [record(0), record(1), record(2)]) == [hosts] * 3


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [record(0), record(1), record(1)],
            "each process must have a rank of its own; 2 processes came with rank 1,"
            " from host1, host1",
        ),
        (
            [record(0), record(2), record(0)],
            "each process must have a rank of its own; 2 processes came with rank 0,"
            " from host0, host0",
        ),
        (
            [record(0), record(1), record(2, 4)],
            "every process must be given the same number of processes; process 2 on"
            " host2 was given 4, and process 0 on host0 was given 3",
        ),
        (
            [record(0), record(1), record(2, same={"jax": "0.12.0", "XLA_FLAGS": ""})],
            "jax must be the same in all processes; got '0.10.2' in process 0 on host0,"
            " process 1 on host1; '0.12.0' in process 2 on host2",
        ),
        (
            [record(0), record(1), record(2, same={"jax": "0.10.2"})],
            "XLA_FLAGS must be the same in all processes; got '' in process 0 on host0,"
            " process 1 on host1; 'absent' in process 2 on host2",
        ),
        (
            [record(0), record(1), record(2, modules={"train": "d"})],
            "the source digest of module train must be the same in all processes; got"
            " 'abc' in process 0 on host0, process 1 on host1; 'd' in process 2 on"
            " host2",
        ),
    ],
)
def test_all_processes_are_told_the_fault(port, records, message):
    for told in outcomes(port, records):
        assert "processes (arguments) with the coordinator 127.0.0.1:" in told
        assert told.endswith(f"\n- {message}")


def test_modules_of_one_process_are_no_difference(port):
    boards = record(1, modules={"train": "abc", "boards": "def"})
    assert outcomes(port, [record(0), boards, record(2)])[0][1] == "host1"


def test_missing_process_is_named_by_all_others(port):
    for told in outcomes(port, [record(0), record(2)], timeout=1.0):
        assert "\n- process 1 did not come within 1 s; those that came are 0 on" in told
        assert " 0 on host0, 2 on host2; check that every process was started" in told
        assert "127.0.0.1 is a loopback address on host0" in told


def test_missing_coordinator_is_reported(port):
    (told,) = outcomes(port, [record(1)], timeout=0.5)
    assert re.search(r"process 1 on host1 could not reach process 0 at .* within", told)
    assert "127.0.0.1 is a loopback address on host1" in told


@pytest.mark.parametrize(
    "said", [b"HTTP/1.0 400\r\n", b'pipejax 0\n{"reasons": 5, "hosts": []}\n', b""]
)
def test_foreign_program_at_the_port_is_reported(port, said):
    with socket.create_server(("127.0.0.1", port)) as server:

        def speak():
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(said)

        threading.Thread(target=speak, daemon=True).start()
        first, second = outcomes(port, [record(0), record(1)], timeout=2.0)
    assert "process 0 on host0 cannot listen at 127.0.0.1:" in first
    assert "another program uses the port" in first
    assert re.search(
        r"could not reach process 0 at \S+ within 2 s"
        r" \((another|process 0 has|the conn|\[Errno)",
        second,
    )


def test_errors_of_all_attempts_are_told(port, monkeypatch):
    secret = "process 0 has another secret"
    attempts = iter([ValueError(secret), ValueError(secret)])

    def introduced(*_):
        raise next(attempts, ConnectionRefusedError("Connection refused"))

    monkeypatch.setattr(_roll_call, "introduced", introduced)
    (told,) = outcomes(port, [record(1)], timeout=0.5)
    assert f"within 0.5 s ({secret}; Connection refused): process 0 does" in told


def test_address_of_another_host_is_refused(port):
    (told,) = outcomes(port, [record(0)], bind=f"192.0.2.1:{port}")  # RFC 5737
    assert "must belong to the host of process 0" in told
    assert f"JAX_COORDINATOR_BIND_ADDRESS, such as 0.0.0.0:{port}" in told


def test_name_unknown_at_first_is_looked_up_again(port, monkeypatch):
    known = socket.getaddrinfo
    missing = iter(range(3))

    def late(host, *args, **kwargs):
        if host == "localhost" and next(missing, None) is not None:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return known(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    assert outcomes(port, [record(0, 1)], bind=f"localhost:{port}") == [["host0"]]
    assert next(missing, None) is None

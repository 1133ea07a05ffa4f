"""Tests how a process introduces itself, and to whom it says nothing."""

import concurrent.futures
import socket
import time

import pytest

from pipejax import launch
from pipejax.launch._introduce import introduced

from .helpers import connected, record

SECRET = b"of this job"


def test_process_0_must_prove_its_secret(port):
    """A program that only greets learns nothing about a process."""
    heard = []
    with socket.create_server(("127.0.0.1", port)) as server:

        def speak():
            with server.accept()[0] as connection:
                connection.sendall(b"pipejax 00\n")
                heard.append(connection.recv(65536))
                connection.sendall(b"0" * 64 + b"\n")
                heard.append(connection.recv(65536))

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            spoken = pool.submit(speak)
            with pytest.raises(ValueError, match="process 0 has another secret"):
                connected(port, secret=SECRET)
            spoken.result()
    line, nothing = heard
    assert len(line.split()) == 2
    assert b"host" not in line
    assert nothing == b""


def test_connection_to_its_own_port_is_refused(port, monkeypatch):
    """The system may choose the coordinator's port for the connection to it."""

    def to_itself(address, timeout):
        connection = socket.socket()
        connection.bind(address)
        connection.connect(address)
        return connection

    monkeypatch.setattr(socket, "create_connection", to_itself)
    place = launch.Place("arguments", f"127.0.0.1:{port}", 2, 1)
    until = time.monotonic() + 1.0
    with pytest.raises(ConnectionRefusedError, match="nothing listens there"):
        introduced(place, record(1, 2), until, b"")


def test_request_is_made_anew_before_the_kernel_waits_long(port, monkeypatch):
    """A network that is away loses a request to connect, and answers none."""
    waited = []

    def lost(address, timeout):
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", lost)
    place = launch.Place("arguments", f"127.0.0.1:{port}", 2, 1)
    for left in (300.0, 1.0):
        with pytest.raises(TimeoutError):
            introduced(place, record(1, 2), time.monotonic() + left, b"")
    assert waited == [5.0, pytest.approx(1.0, abs=0.1)]

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

"""Processes that say what they are before they join, some of them as threads."""

import contextlib
import importlib.metadata
import re
import socket
import subprocess
import sys
import threading
from typing import NamedTuple

import jax
import pytest

from pipejax import launch
from pipejax.launch import _initialize, _record

from .helpers import free_port, outcomes, record


@pytest.fixture
def port():
    return free_port()


def test_all_alike_are_told_who_is_where(port):
    hosts = ["host0", "host1", "host2"]
    assert outcomes(port, [record(2), record(0), record(1)]) == [hosts] * 3
    # Not even the port is left behind.
    assert outcomes(port, [record(0), record(1), record(2)]) == [hosts] * 3


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [record(0), record(1), record(1)],
            "process 1 came 2 times, from host1, host1",
        ),
        (
            [record(0), record(2), record(0)],
            "process 0 came 2 times, from host0, host0",
        ),
        (
            [record(0), record(1), record(2, 4)],
            "process 2 on host2 is one of 4, and process 0 on host0 of 3",
        ),
        (
            [record(0), record(1), record(2, same={"jax": "0.12.0", "XLA_FLAGS": ""})],
            "jax differs: '0.10.2' in 0 on host0, 1 on host1; '0.12.0' in 2 on host2",
        ),
        (
            [record(0), record(1), record(2, same={"jax": "0.10.2"})],
            "XLA_FLAGS differs: '' in 0 on host0, 1 on host1; 'absent' in 2 on host2",
        ),
        (
            [record(0), record(1), record(2, modules={"train": "d"})],
            "module train differs: 'abc' in 0 on host0, 1 on host1; 'd' in 2 on host2",
        ),
    ],
)
def test_all_are_told_what_is_wrong(port, records, message):
    for told in outcomes(port, records):
        assert "processes (arguments) cannot begin at 127.0.0.1:" in told
        assert told.endswith(f"\n- {message}")


def test_modules_that_only_one_has_imported_are_no_difference(port):
    boards = record(1, modules={"train": "abc", "boards": "def"})
    assert outcomes(port, [record(0), boards, record(2)])[0][1] == "host1"


def test_of_many_differences_some_are_named():
    many = {f"module{i}": "abc" for i in range(12)}
    others = dict.fromkeys(many, "def")
    records = [record(rank, 9, modules=others if rank else many) for rank in range(9)]
    *lines, last = _record.differences(records)
    assert len(lines) == 5
    assert lines[0] == (
        "module module0 differs: 'abc' in 0 on host0; 'def' in 1 on host1, 2 on host2,"
        " 3 on host3, 4 on host4, 5 on host5 and 3 more"
    )
    assert last == "and 7 more like these"


def test_who_does_not_come_is_named_by_all_others(port):
    for told in outcomes(port, [record(0), record(2)], timeout=1.0):
        assert (
            "\n- process 1 did not come within 1 s; there are 0 on host0, 2 on host2\n"
            in told
        )
        assert "127.0.0.1 is loopback on host0" in told


def test_nobody_at_the_coordinator(port):
    (told,) = outcomes(port, [record(1)], timeout=0.5)
    assert re.search(r"process 1 on host1 could not reach process 0 at .* within", told)
    assert "127.0.0.1 is loopback on host1" in told


@pytest.mark.parametrize(
    "said", [b"HTTP/1.0 400\r\n", b'pipejax\n{"reasons": 5, "hosts": []}\n', b""]
)
def test_another_program_at_the_port(port, said):
    with socket.create_server(("127.0.0.1", port)) as server:

        def speak():
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(said)

        threading.Thread(target=speak, daemon=True).start()
        first, second = outcomes(port, [record(0), record(1)], timeout=2.0)
    assert "process 0 on host0 cannot listen at 127.0.0.1:" in first
    assert "another program's" in first
    assert re.search(
        r"could not reach process 0 at \S+ within 2 s \((another|what|the conn)", second
    )


def test_an_address_of_another_host(port):
    (told,) = outcomes(port, [record(0)], bind=f"192.0.2.1:{port}")  # RFC 5737
    assert "must be one of process 0's own host" in told
    assert "JAX_COORDINATOR_BIND_ADDRESS" in told


def test_a_name_that_is_not_known_yet(port, monkeypatch):
    known = socket.getaddrinfo
    missing = iter(range(3))

    def late(host, *args, **kwargs):
        if host == "localhost" and next(missing, None) is not None:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return known(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    assert outcomes(port, [record(0, 1)], bind=f"localhost:{port}") == [["host0"]]
    assert next(missing, None) is None


def test_a_record_is_of_versions_settings_config_and_own_sources(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1  --xla_dump_to=/tmp/0 --xla_a=2")
    place = launch.Place("arguments", "host:1", 2, 1)
    mine = _record.of_this_process(place, {"learning_rate": 0.1})
    assert (mine.rank, mine.processes, mine.host) == (1, 2, socket.gethostname())
    assert mine.same["config learning_rate"] == "0.1"
    assert mine.same["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"
    assert {"Python", "jax", "optax", "jax_enable_x64"} <= mine.same.keys()
    assert __name__ in mine.modules
    assert not {"json", "jax", "numpy"} & mine.modules.keys()
    assert _record.Record.from_json(mine.to_json()) == mine


def test_a_package_that_is_not_installed_is_absent(monkeypatch):
    def version(package):
        if package == "flax":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    place = launch.Place("arguments", "host:1", 2, 1)
    same = _record.of_this_process(place, {}).same
    assert (same["flax"], same["jax"]) == ("absent", "1.0")


PROGRAM = """
import sys
import jax
import pipejax as pj

rank, port, setting = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_threefry_partitionable", bool(setting))
jax.config.update("jax_num_cpu_devices", 2)
place = pj.launch.initialize(f"127.0.0.1:{port}", 2, rank, timeout=60)
print(place.rank, jax.process_count(), len(jax.devices()), flush=True)
"""


def programs(port, *settings):
    """Ends of two processes, as a user would start them."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(setting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, setting in enumerate(settings)
    ]
    try:
        return [(*each.communicate(timeout=240), each.returncode) for each in running]
    finally:
        for each in running:
            each.kill()


@pytest.mark.full  # in the quick run the jobs of the other files join
def test_two_processes_join(port):
    for rank, (out, errors, code) in enumerate(programs(port, 1, 1)):
        assert code == 0, errors
        assert out == f"{rank} 2 4\n"


def test_processes_have_as_many_devices_as_one_another(monkeypatch):
    """One of a host's GPUs is lost, say: its process sees the others all the same."""

    class Device(NamedTuple):
        process_index: int

    monkeypatch.setattr(jax, "devices", lambda: [Device(0), Device(0), Device(1)])
    with pytest.raises(launch.RollCallError, match="2 in 0 on host0, 1 in 1 on host1"):
        _initialize.check_devices(["host0", "host1"])


def test_two_processes_of_other_settings_do_not(port):
    for _, errors, code in programs(port, 1, 0):
        assert code == 1
        assert "jax_threefry_partitionable differs: 'True' in 0 on" in errors

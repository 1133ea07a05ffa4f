"""Tests the emulated cluster: its links, its output, and that nothing remains of it."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import cluster
from experiments.cluster import _start

ROOT = pathlib.Path(__file__).parents[2]
WHY_NOT = cluster.reason_why_not()
needs_namespaces = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# Host 0 receives 100,000 bytes from each other host, and each host prints how many
# bytes its link has carried.
TRANSFER = """
import os, socket, time
from experiments.cluster import member
rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
before = member.wire()
if rank == 0:
    server = socket.create_server(place)
    for _ in range(1, hosts):
        peer, _ = server.accept()
        with peer:
            while peer.recv(65536):
                pass
            peer.sendall(b"x")
else:
    while True:
        try:
            link = socket.create_connection(place)
            before = member.wire()  # without attempts that came too early
            break
        except ConnectionRefusedError:
            time.sleep(0.2)
    link.sendall(bytes(100_000))
    link.shutdown(socket.SHUT_WR)
    link.recv(1)
carried = member.wire().since(before)
print(carried.sent, carried.received)
"""


def arguments(*options, command):
    return [sys.executable, "-m", "experiments.cluster", *options, "--", *command]


def run(*options, command):
    """Returns the exit code, the hosts' lines by host, and the messages about them."""
    done = subprocess.run(
        arguments(*options, command=command),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line.split(" | ", 1) for line in done.stdout.splitlines()]
    hosts = {host: [] for host, _ in sorted(lines)}
    for host, line in lines:
        hosts[host].append(line)
    return done.returncode, hosts, done.stderr


@needs_namespaces
def test_each_host_has_a_name_and_an_address():
    ask = "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n))"
    code, hosts, _ = run("--hosts", "3", command=[sys.executable, "-c", ask])
    assert code == 0
    assert hosts == {f"host{i}": [f"host{i} 10.77.0.{i + 1}"] for i in range(3)}


@needs_namespaces
def test_links_have_the_given_rates():
    show = ["tc", "qdisc", "show", "dev", "eth0"]
    options = ("--hosts", "2", "--rate", "500mbit", "50mbit")
    code, hosts, _ = run(*options, command=show)
    assert code == 0
    assert "rate 500Mbit" in hosts["host0"][0]
    assert "rate 50Mbit" in hosts["host1"][0]


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.full)])
def test_counted_bytes_are_read_from_the_link(number):
    """Links carry data, headers (66 bytes of each 1,514) and as many bytes of acks."""
    code, hosts, said = run(
        *("--hosts", str(number), "--rate", "1gbit"),
        command=[sys.executable, "-c", TRANSFER],
    )
    assert code == 0, said
    carried = {
        host: [int(n) for n in lines[-1].split()] for host, lines in hosts.items()
    }
    others = number - 1
    assert len(carried) == number
    for host in range(1, number):
        assert 100_000 < carried[f"host{host}"][0] < 115_000
        assert carried[f"host{host}"][1] < 15_000
    assert 100_000 * others < carried["host0"][1] < 115_000 * others


@needs_namespaces
def test_first_failure_ends_all_hosts():
    fail = '[ "$RANK" = 1 ] && echo gone && exit 7; sleep 600'
    code, hosts, said = run("--hosts", "3", command=["sh", "-c", fail])
    assert code == 7
    assert hosts == {"host1": ["gone"]}
    assert said == "host1 failed with exit code 7\n"


@needs_namespaces
@pytest.mark.parametrize("number", ["KILL", "TERM", "INT"])
def test_killed_cluster_leaves_no_process_and_no_network(number):
    """Nothing remains that would prevent the next start."""
    mark = f"pipejax cluster {os.getpid()} {number}"
    wait = ["sh", "-c", f"echo up; sleep 600 # {mark}"]
    with subprocess.Popen(
        arguments("--hosts", "2", command=wait),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout.readline().endswith(b"| up\n")
        assert alive(mark)
        parent.send_signal(signal.Signals[f"SIG{number}"])
        code = parent.wait(timeout=60)
        assert code == {"KILL": -9, "TERM": 143, "INT": 130}[number]
    deadline = time.monotonic() + 60
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(mark)
    assert not pathlib.Path("/sys/class/net/switch").exists()
    assert run("--hosts", "2", command=["true"])[0] == 0


def alive(mark):
    """Returns the processes with `mark` in their command line."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hosts", "0"], "`hosts` must be from 1 to 250, got 0."),
        (["--rate", "500"], "`rate` must be a number and bit, kbit, mbit or gbit, got"),
        (["--rate", "0mbit"], "`rate` must be a number and bit"),
        (["--hosts", "3", "--rate", "1mbit", "2mbit"], "`rate` must be one for all"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, says):
    code, hosts, said = run(*options, command=["true"])
    assert code == 2
    assert not hosts
    assert said.startswith(says)
    assert said.count("\n") == 1


def test_missing_command_is_refused():
    code, _, said = run("--hosts", "2", command=[])
    assert code == 2
    assert said.startswith("What is to run on the hosts?")


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no setpriv, unshare" in cluster.reason_why_not()


def test_refusal_of_the_kernel_is_reported(monkeypatch):
    if WHY_NOT and "there is no" in WHY_NOT:
        pytest.skip(WHY_NOT)
    refusal = ("sh", "-c", "echo 'unshare: Operation not permitted' >&2; exit 1")
    monkeypatch.setattr(_start, "_APART", refusal)
    assert cluster.reason_why_not() == (
        "The kernel allows no network namespaces here: unshare: Operation not permitted"
    )


@pytest.mark.parametrize(("hosts", "size"), [(1, 6), (2, 3), (4, 1), (6, 1), (9, 1)])
def test_cores_are_shared_out_among_hosts(monkeypatch, hosts, size):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 16)))
    shares = [_start.cores(host, hosts) for host in range(hosts)]
    assert all(len(share) == size for share in shares)
    assert len(set().union(*shares)) == min(6, size * hosts)

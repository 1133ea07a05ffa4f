"""Tests what a record holds, what is read as a record, and how two records differ."""

import importlib.metadata
import json
import socket

import pytest

from pipejax import launch
from pipejax.launch import _record

from .helpers import record


def test_differences_beyond_a_limit_are_only_counted():
    many = {f"module{i}": "abc" for i in range(12)}
    others = dict.fromkeys(many, "def")
    records = [record(rank, 9, modules=others if rank else many) for rank in range(9)]
    *lines, last = _record.differences(records)
    assert len(lines) == 5
    assert lines[0] == (
        "the source digest of module module0 must be the same in all processes; got"
        " 'abc' in process 0 on host0; 'def' in process 1 on host1, process 2 on host2,"
        " process 3 on host3, process 4 on host4, process 5 on host5 and 3 more"
    )
    assert last == "and 7 more like these"


def test_record_holds_versions_settings_config_and_sources(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1  --xla_dump_to=/tmp/0 --xla_a=2")
    place = launch.Place("arguments", "host:1", 2, 1)
    mine = _record.of_this_process(place, {"learning_rate": 0.1}, _record.own_modules())
    assert (mine.rank, mine.processes, mine.host) == (1, 2, socket.gethostname())
    assert mine.same["config learning_rate"] == "0.1"
    assert mine.same["XLA_FLAGS"] == "--xla_a=2 --xla_b=1"
    assert {"Python", "jax", "optax", "jax_enable_x64"} <= mine.same.keys()
    assert __name__ in mine.modules
    assert not {"json", "jax", "numpy"} & mine.modules.keys()
    assert _record.Record.from_json(mine.to_json()) == mine


def test_missing_package_is_recorded_as_absent(monkeypatch):
    def version(package):
        if package == "flax":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    place = launch.Place("arguments", "host:1", 2, 1)
    same = _record.of_this_process(place, {}, {}).same
    assert (same["flax"], same["jax"]) == ("absent", "1.0")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": "1"}, "not the record of a process: rank"),
        ({"rank": True}, "not the record of a process: rank"),
        ({"processes": 2.0}, "not the record of a process: processes"),
        ({"same": []}, "not the record of a process: same"),
        ({"same": {"jax": 1}}, "not the record of a process: same"),
        (
            {"modules": {"train": None}},
            "not the record of a process: modules",
        ),
        ({"more": 1}, "the line is not the record of a process$"),
    ],
)
def test_malformed_record_is_refused(change, says):
    known = json.loads(record(1).to_json())
    with pytest.raises(ValueError, match=says):
        _record.Record.from_json(json.dumps(known | change).encode())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not the record of a process"),
        (b"1", "not the record of a process"),
    ],
)
def test_line_other_than_a_json_object_is_refused(line, says):
    with pytest.raises(ValueError, match=f"the line is {says}"):
        _record.Record.from_json(line)


def test_equal_processes_are_grouped_and_shared_modules_compared():
    records = [
        record(0, modules={"train": "abc", "boards": "1"}),
        record(1, same={"jax": "0.12.0", "XLA_FLAGS": ""}),
        record(2, same={"jax": "0.10.2"}, modules={"train": "def"}),
    ]
    assert _record.differences(records) == [
        "jax must be the same in all processes; got '0.10.2' in process 0 on host0,"
        " process 2 on host2; '0.12.0' in process 1 on host1",
        "XLA_FLAGS must be the same in all processes; got '' in process 0 on host0,"
        " process 1 on host1; 'absent' in process 2 on host2",
        "the source digest of module train must be the same in all processes; got"
        " 'abc' in process 0 on host0, process 1 on host1; 'def' in process 2 on host2",
    ]
    assert _record.differences([record(0), record(1)]) == []

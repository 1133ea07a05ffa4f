"""Tests the experiments for a GPU on the CPU, and reads a profile."""

import gzip
import json

import jax
import pytest

from experiments import codec_speed
from experiments.gpu import __main__ as gpu
from experiments.gpu import _codecs, _exact, _steps, _trace

from . import here

EQUAL = {"same_bits": True, "largest_difference": 0}


def cells(out):
    return {cell["part"]: cell for cell in json.loads(out.read_text())["cells"]}


@pytest.mark.full
def test_gpu_experiment_measures_every_part(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    here.run(monkeypatch, "gpu", "--out", str(out))
    parts = cells(out)
    assert set(parts) == {part for parts in gpu.PARTS.values() for part in parts}
    assert not [name for name, found in parts.items() if "failed" in found]


def test_codec_speed_is_given_relative_to_a_copy(monkeypatch):
    few = {"truncate": codec_speed.CODECS["truncate"]}
    monkeypatch.setattr(codec_speed, "CODECS", few)
    found = _codecs.measured()
    assert found["copy"]["of_the_copy"] == 1
    assert set(found) == {"copy", "truncate, encode", "truncate, decode"}
    assert all(row["gigabytes_per_second"] > 0 for row in found.values())


@pytest.mark.full
def test_steps_have_the_same_bits_as_by_hand():
    """On a CPU, the last update of a drain may be rounded in another way."""
    found = _exact.measured()
    assert found["steps"]["width 1"] == EQUAL
    assert all(step["largest_difference"] < 1e-6 for step in found["steps"].values())
    assert found["restored"] == found["skipped"] == EQUAL
    same = {name for name, row in found["codecs"].items() if row["same_message"]}
    assert same == set(codec_speed.CODECS)


def test_memory_of_a_program_is_known_without_allocator_counts():
    found = _steps.memory("mlp", "width 2, plain")
    assert found["allocator"] == {"bytes_in_use": None, "peak_bytes_in_use": None}
    assert found["program"]["live"] > found["program"]["temporaries"] > 0


@pytest.mark.full
def test_overlap_on_several_devices_has_measured_times():
    found = _steps.overlapped("mlp")
    assert len(jax.devices()) > 1
    assert found["covered"] == 0  # on CPU a collective blocks
    assert all(len(found[name]) == 2 for name in ("compute", "communication", "step"))


def event(name, start, length, pid=1):
    return {"ph": "X", "pid": pid, "name": name, "ts": start, "dur": length}


def test_profile_counts_time_beside_kernels(tmp_path):
    """Kernels run at 0-10 and 20-30, a copy at 5-15, a collective at 18-22."""
    events = [
        {"name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
        event("loop_add_fusion", 0, 6),
        event("gemm", 4, 6),
        event("gemm", 20, 10),
        event("MemcpyD2H", 5, 10),
        event("ncclDevKernel_AllReduce", 18, 4),
        event("gemm", 0, 100, pid=2),
    ]
    with gzip.open(tmp_path / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert _trace.read(tmp_path) == {
        "kernels": {"microseconds": 20, "beside_kernels": 20},
        "copies": {"microseconds": 10, "beside_kernels": 5},
        "collectives": {"microseconds": 4, "beside_kernels": 2},
    }


def test_failed_and_omitted_parts_are_recorded(tmp_path, monkeypatch):
    def run(part, seconds):
        assert 0 < seconds <= gpu.Config().seconds
        if part == "codecs":
            return {"failed": "exit code 1: no memory"}
        return {"device": "1 x Card", "found": {}}

    monkeypatch.setattr(gpu, "run", run)
    out = tmp_path / "gpu.json"
    assert gpu.main(gpu.Config(parts=("codecs", "exact"), out=out)) == 1
    assert cells(out)["codecs"]["failed"] == "exit code 1: no memory"
    assert cells(out)["exact"]["device"] == "1 x Card"
    assert gpu.main(gpu.Config(parts=("trace",), seconds=0, out=out)) == 0
    assert list(cells(out)) == ["codecs", "exact", "trace"]
    assert cells(out)["trace"]["left_out"] == "the time was up"


def test_part_is_stopped_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0)
    assert gpu.run("exact", 0.01) == gpu.TIME_IS_UP


@pytest.mark.full
def test_failing_part_records_its_error():
    found = gpu.run("memory:mlp:width 9", 480)
    assert found == {"failed": "exit code 1: KeyError: 'width 9'"}

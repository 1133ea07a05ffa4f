"""Tests the share of a host that each of its processes gets."""

import os

import pytest

from pipejax.launch import _share


def test_each_gpu_gets_a_process():
    assert _share.gpus({"CUDA_VISIBLE_DEVICES": "0,2,5"}) == 3
    assert _share.gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    job = _share.Job(4, 2, 1, "node0:99")
    variables = _share.environment(job, 2, gpus=4)
    assert variables["JAX_PROCESS_ID"] == "6"
    assert variables["JAX_LOCAL_DEVICE_IDS"] == "2"
    assert "NPROC" not in variables


def test_gpus_are_shared_out_among_processes():
    assert list(_share.accelerators(1, 3, 6)) == [2, 3]
    variables = _share.environment(_share.Job(2, 1, 0, "host:1"), 1, gpus=4)
    assert variables["JAX_LOCAL_DEVICE_IDS"] == "2,3"
    for processes in (3, 5):
        with pytest.raises(ValueError, match="`processes` must divide the 4 GPUs"):
            _share.accelerators(0, processes, 4)


@pytest.mark.parametrize(("count", "size"), [(1, 6), (2, 3), (4, 1), (6, 1), (9, 1)])
@pytest.mark.parametrize(("devices", "threads"), [(1, 2), (2, 6)])
def test_cores_are_shared_out_among_processes(
    monkeypatch, count, size, devices, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 16)))
    monkeypatch.setattr(_share, "configured_devices", lambda: devices)
    shares = [_share.cores(local, count) for local in range(count)]
    assert all(len(share) == size for share in shares)
    assert len(set().union(*shares)) == min(6, size * count)
    variables = _share.environment(_share.Job(count, 1, 0, "host:1"), 0, gpus=0)
    assert variables["NPROC"] == str(max(threads, size))


@pytest.mark.parametrize("counts", [(0, 1, 0), (1, 0, 0), (1, 2, 2), (1, 2, -1)])
def test_impossible_counts_of_a_job_are_refused(counts):
    with pytest.raises(ValueError, match=r"`(processes|hosts|host)` must"):
        _share.Job(*counts, "host:1")

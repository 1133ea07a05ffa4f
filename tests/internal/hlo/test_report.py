"""Tests the numbers of a report and its table."""

import json

import pytest

from pipejax._internal.hlo._report import amount
from pipejax._internal.wire import wire_bytes
from pipejax.overlap import inspect

from ...overlap import FLOPS, GROUPS, HIDDEN, dots, program


@pytest.fixture
def report():
    return inspect(program(HIDDEN))


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 150),
        ("reduce-scatter", 75),
        ("all-to-all", 75),
        ("ragged-all-to-all", 75),
        ("all-gather", 300),
        ("collective-permute", 100),
        ("collective-broadcast", 100),
        ("send", 100),
        ("recv", 0),
    ],
)
def test_wire_bytes_follow_the_kind_of_collective(kind, sent):
    assert wire_bytes(kind, 4, 100.0) == sent
    assert wire_bytes(kind, 1, 100.0) == 0


def test_share_is_weighted_by_bytes_sent(report):
    assert [c.bytes for c in report.collectives] == [400, 300]
    assert [c.share for c in report.collectives] == [1, 0]
    assert [c.wire_bytes for c in report.collectives] == [700, 2100]
    assert report.share == pytest.approx(1 / 4)
    assert report.covered == 1


def test_report_can_be_written_as_json(report):
    found = json.loads(json.dumps(report.to_dict()))
    assert found["flops"] == 2 * FLOPS
    assert found["operations"] == 5
    assert found["share"] == pytest.approx(1 / 4)
    assert found["collectives"][0]["dtypes"] == ["f32"]
    assert found["collectives"][0]["op_name"] == "jit(step)/psum"
    assert found["uncounted"] == []
    assert found["memory"] is None  # text does not contain the memory


def test_report_is_printed_as_an_aligned_table(report):
    lines = str(report).splitlines()
    head = "step: 2.05 kFLOP in matmuls and convolutions (2), kernels (5)"
    assert lines[0] == f"{head}, collectives (2)"
    columns = [line.split() for line in lines[2:5]]
    assert columns[0][0] == "collective"
    assert columns[1][:2] == ["all-reduce", "f32"]
    assert "async" in columns[1]
    assert "SYNC" in columns[2]
    words = zip(lines[2:5], ("dtype", "f32", "u8"), strict=True)
    assert len({line.index(word) for line, word in words}) == 1
    assert lines[-1] == "share of FLOPs under communication, weighted by bytes: 0.25"


def test_uncounted_operations_are_printed():
    line = '%g = f32[8,8] custom-call(%p), custom_call_target="__cudnn$fmha"'
    report = inspect(program(f"{line}\nROOT %r = f32[100] copy(%x)"))
    assert report.uncounted == ("g: __cudnn$fmha, its FLOPs counted as 0",)
    assert "not counted: g: __cudnn$fmha" in str(report)


def test_report_without_collectives_lists_possible_reasons():
    report = inspect(program(f"{dots('a')}\nROOT %r = f32[100] copy(%x)"))
    assert report.share is None
    assert report.covered == 0
    said = " ".join(str(report).split())
    for reason in ("one device", "without a mesh", "XLA removed", "host executor"):
        assert reason in said
    assert "JAX_NUM_CPU_DEVICES=8 in the environment" in said


def test_report_without_flops_has_no_share():
    report = inspect(program(f"ROOT %r = f32[100] all-reduce(%x), {GROUPS}"))
    assert report.share is None
    assert report.covered is None
    assert str(report).endswith("weighted by bytes: none, it has no matmul")


def test_amounts_are_printed_with_unit_prefixes():
    found = [amount(x) for x in (0, 999, 1000, 1.5e7, 2e13)]
    assert found == ["0 ", "999 ", "1 k", "15 M", "20 T"]


def test_collective_of_one_device_has_no_share():
    line = "ROOT %r = f32[100] all-reduce(%x), replica_groups={{0}}"
    report = inspect(program(f"{dots('a')}\n{line}"))
    assert report.share is None
    assert str(report).endswith("weighted by bytes: none, nothing is sent")

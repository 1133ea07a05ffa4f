"""Speeds that are assumed: by the memory, and held against what was measured."""

import dataclasses
import json
import pathlib
import statistics

import pytest

from pipejax import timing

RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_a_core_copies_as_fast_as_was_measured():
    copy = result("codec_speed")["pages"]["huge pages"]["copy"]
    measured = copy["bytes moved"] / copy["ms"] * 1e3
    assert timing.DEVICES["cpu"].memory == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "row"), [("bf16", "bf16"), ("int8", "int8, block 256")]
)
@pytest.mark.parametrize("way", ["encode", "decode"])
def test_codecs_on_a_core_were_that_fast_and_less_than_twice(name, row, way):
    """The rule is a bound from below: half of what a copy moves in the same time."""
    record = result("codec_speed")
    size = record["mebibytes"] * 2**20
    rows = record["pages"]["huge pages"]
    measured = size / rows[f"{row}, {way}"]["ms"] * 1e3
    assumed = getattr(timing.assumed(2, 1e9).codec(name), way)
    assert 0.99 < measured / assumed < 2


def test_gloo_has_the_shares_that_were_fitted():
    """Of two hosts there is no shift."""
    cells = result("prediction")["cells"]
    for name, share in dataclasses.asdict(timing.DEVICES["cpu"].shares).items():
        fitted = statistics.median(
            cell["cluster"]["shares"][name]
            for cell in cells
            if name != "shift" or cell["hosts"] > 2
        )
        assert share == pytest.approx(fitted, abs=0.005)


def test_a_gpu_by_its_data_sheet():
    """H100: 3.35 TB/s of memory, 18 links of 25 GB/s, and 1.25 passes of int8."""
    cluster = timing.assumed(4, 125e6, 8, device="h100", latency=1e-5)
    assert (cluster.hosts, cluster.devices) == (4, 8)
    assert cluster.link == timing.Link(1e-5, 125e6)
    assert cluster.inner.bandwidth == 18 * 25e9
    assert cluster.codec("int8").encode == pytest.approx(3.35e12 / 2 / 1.25, rel=1e-2)
    assert cluster.codec("power_sgd").decode == pytest.approx(3.35e12 / 2, rel=1e-2)
    assert cluster.reduction == pytest.approx(3.35e12 / 6, rel=1e-2)
    assert cluster.shares == timing.Shares()
    assert timing.assumed(4, 125e6, device="b200").inner is None


def test_a_device_of_which_nothing_is_known():
    with pytest.raises(ValueError, match=r"`device` must be one of cpu, a100, h100, h"):
        timing.assumed(4, 125e6, device="v5e")

"""Tests the speeds that are assumed from the memory against measurements."""

import dataclasses
import json
import pathlib
import statistics

import pytest

from pipejax import timing

RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_copy_speed_of_a_core_equals_the_measurement():
    copy = result("codec_speed")["pages"]["huge pages"]["copy"]
    measured = copy["bytes moved"] / copy["ms"] * 1e3
    assert timing.DEVICES["cpu"].memory == pytest.approx(measured, rel=1e-3)


def seconds(row):
    return result("codec_speed")["pages"]["huge pages"][row]["ms"] / 1e3


# The feedback of int4 takes as long as that of int8, which was measured: the residual
# is added, and what is sent is decoded and subtracted.
FEEDBACK = seconds("int8, fed back, encode") - seconds("int8, block 256, encode")
FEEDBACK -= seconds("int8, block 256, decode")


@pytest.mark.parametrize(
    ("name", "encode", "decode"),
    [
        ("bf16", seconds("bf16, encode"), seconds("bf16, decode")),
        (
            "int8",
            seconds("int8, block 256, encode"),
            seconds("int8, block 256, decode"),
        ),
        ("fp8_e4m3", seconds("fp8 e4m3, encode"), seconds("fp8 e4m3, decode")),
        (
            "int4",
            seconds("int4, encode") + seconds("int4, decode") + FEEDBACK,
            seconds("int4, decode"),
        ),
    ],
)
def test_assumed_codec_speeds_are_lower_bounds_of_measurements(name, encode, decode):
    """The assumed speeds are lower bounds of the measured ones."""
    size = result("codec_speed")["mebibytes"] * 2**20
    assumed = timing.assumed(2, 1e9).codec(name)
    assert 0.99 < size / encode / assumed.encode < 2
    assert 0.99 < size / decode / assumed.decode < 2


def test_assumed_shares_of_gloo_equal_the_fitted_medians():
    """Two hosts have no shift, so their share of it is left out."""
    cells = result("prediction")["cells"]
    for name, share in dataclasses.asdict(timing.DEVICES["cpu"].shares).items():
        fitted = statistics.median(
            cell["cluster"]["shares"][name]
            for cell in cells
            if name != "shift" or cell["hosts"] > 2
        )
        assert share == pytest.approx(fitted, abs=0.005)


def test_assumed_gpu_follows_its_data_sheet():
    """The H100 has 3.35 TB/s of memory and 18 links of 25 GB/s."""
    cluster = timing.assumed(4, 125e6, 8, device="h100", latency=1e-5)
    assert (cluster.hosts, cluster.devices) == (4, 8)
    assert cluster.link == timing.Link(1e-5, 125e6)
    assert cluster.inner.bandwidth == 18 * 25e9
    assert cluster.codec("int8").encode == pytest.approx(3.35e12 / 2 / 1.25, rel=1e-2)
    assert cluster.codec("power_sgd").decode == pytest.approx(3.35e12 / 2, rel=1e-2)
    assert cluster.reduction == pytest.approx(3.35e12 / 6, rel=1e-2)
    assert cluster.shares == timing.Shares()
    assert timing.assumed(4, 125e6, device="b200").inner is None


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"`device` must be one of cpu, a100, h100, h"):
        timing.assumed(4, 125e6, device="v5e")

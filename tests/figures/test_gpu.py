"""Tests the results on a GPU, and what the documents say about them."""

import statistics

import pipejax as pj
from experiments.tables import TABLES, _gpu

from .quoted import column, least_and_most, quoted_in


@quoted_in("docs/speed.md")
def test_step_times_are_quoted():
    ratios = [column("gpu.steps", name, "transformer") for name in _gpu.STEPS[:3]]
    yield f"costs at most {100 * (max(map(max, ratios)) - 1):.0f} %"
    (checked,) = column("gpu.steps", "the check alone", "resnet18")
    yield f"differ by {checked:.2f}"


def test_documents_claim_bits_of_gpu_result():
    exact = _gpu.found("exact")
    compared = [*exact["steps"].values(), exact["restored"], exact["skipped"]]
    assert all(comparison["same_bits"] for comparison in compared)
    others = {n for n, row in exact["codecs"].items() if not row["same_message"]}
    assert {name.split(",")[0] for name in others} == {"int8", "sign"}


@quoted_in("docs/speed.md")
def test_codec_speeds_are_quoted():
    _, _, *coded = column("gpu.codecs", "decoding")  # without truncate and bf16
    yield f"decode at {least_and_most(coded)}"
    yield f"{_gpu.found('codecs')['copy']['gigabytes_per_second']:,.0f} GB/s"


@quoted_in("docs/overlap.md")
def test_step_over_link_is_quoted():
    figures = _gpu.found("hosts:1gbit:psum")
    exchange = statistics.median(figures["communication"])
    longer = exchange - figures["wire_bytes"] / (1e9 / 8)
    yield f"took {1e3 * longer:.0f} ms longer than its bytes"
    yield f"took {TABLES['gpu.link']()[1][4]} times the longer"


@quoted_in("docs/timing.md")
def test_speeds_beside_assumed_speeds_are_quoted():
    cluster = pj.timing.assumed(2, 1e9, device="h100")
    names = {"bf16": "bf16", "int8": "int8, block 256", "fp8_e4m3": "fp8 e4m3"}
    ratios = []
    for name, title in names.items():
        for way in ("encode", "decode"):
            _, ms, _ = _gpu.found("codecs")[f"{title}, {way}"]["quartiles_ms"]
            speed = 256 * 2**20 / (1e-3 * ms)
            ratios.append(speed / getattr(cluster.codec(name), way))
    yield f"{least_and_most(ratios)} times the assumed speed"
